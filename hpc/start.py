"""What a job's script does around its command: claims the attempt, records its end.

Called by the scripts as `python -m hpc.start begin|end|refuse|scratch|resubmit`. Knows what an end
means only through `hpc.attempts`; runs no command of the job itself.
"""

import argparse
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpc import ledger, slurm
from hpc.attempts import TERMINATE, Attempt, Decision, Ending, Next, decide, without_progress
from hpc.errors import EXIT_CONTINUE, EXIT_USER, HpcError, PlanError, UserError
from hpc.files import publish
from hpc.rundir import RunDirectory
from hpc.scratch import attempt_directory, make_scratch, owner, remove_scratch

LOCAL = "local-"
"""Job ids of the local backend begin so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The job that this process belongs to, read from the script's variables."""

    run: RunDirectory
    job: str
    role: str
    index: int
    job_id: str
    max_attempts_without_progress: int
    on_preempt: str
    scratch_base: str
    walltime_minutes: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Context":
        """Raises PlanError where a variable of the script is missing or isn't a number."""
        try:
            return cls(
                run=RunDirectory(Path(environment["PRORL_RUN_DIR"])),
                job=environment["PRORL_JOB"],
                role=environment["PRORL_ROLE"],
                index=int(environment["PRORL_INDEX"]),
                job_id=job_id(environment),
                max_attempts_without_progress=int(environment["PRORL_ATTEMPTS_WITHOUT_PROGRESS"]),
                on_preempt=environment["PRORL_ON_PREEMPT"],
                scratch_base=environment["PRORL_SCRATCH_BASE"],
                walltime_minutes=int(environment["PRORL_WALLTIME_MINUTES"]),
            )
        except (KeyError, ValueError) as err:
            raise PlanError(
                f"not inside a script of prorl-hpc: {err}; run its sbatch file"
            ) from err


def job_id(environment: Mapping[str, str]) -> str:
    """`123`, `123_4` for an array task, `local-PID` without Slurm."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    given = environment.get("PRORL_JOB_ID", "")
    local = given if given.startswith(LOCAL) else f"{LOCAL}{os.getppid()}"
    return environment.get("SLURM_JOB_ID") or local


def claim_attempt(run: RunDirectory, role: str, *, index: int) -> int:
    """The number of a new attempt: the first whose directory could be made.

    Two jobs that believe to be the same index thus never share a number.
    """
    logs = run.job_logs(role, index=index)
    logs.mkdir(parents=True, exist_ok=True)
    taken = [int(path.name[8:]) for path in logs.glob("attempt-*") if path.name[8:].isdigit()]
    attempt = max(taken, default=0) + 1
    while True:
        try:
            run.attempt_logs(role, index=index, attempt=attempt).mkdir()
        except FileExistsError:
            attempt += 1
        else:
            return attempt


def read_progress(run: RunDirectory, role: str, *, index: int) -> float | None:
    """The number in the role's progress file; None where there is none that can be read."""
    try:
        return float(run.progress(role, index=index).read_text().strip())
    except (OSError, ValueError):
        return None


def why_not(run: RunDirectory, job: str, *, index: int) -> str:
    """Why no further attempt is wanted; empty where one is."""
    if run.stop_request.exists():
        return "the run was cancelled"
    try:
        desired = int(run.desired(job).read_text())
    except (OSError, ValueError):
        return ""
    return f"the job was scaled down to {desired}" if index >= desired else ""


def deadline(context: Context, *, environment: Mapping[str, str], now: float) -> float | None:
    """When the walltime ends (Unix seconds): as Slurm says, else counted from now."""
    given = environment.get("SLURM_JOB_END_TIME", "")
    if given.isdigit():
        return float(given)
    slurm_id = environment.get("SLURM_JOB_ID")
    asked = slurm.end_time(slurm_id) if slurm_id else None
    return asked if asked is not None else now + 60.0 * context.walltime_minutes


def begin(
    context: Context, *, environment: Mapping[str, str], now: float, script_pid: int | None = None
) -> str:
    """Claims an attempt and records its start. Returns shell text for the script's `eval`."""
    reason = why_not(context.run, context.job, index=context.index)
    if reason:
        return f"exit 0 # {reason}\n"
    run, role, index = context.run, context.role, context.index
    attempt = claim_attempt(run, role, index=index)
    ends = deadline(context, environment=environment, now=now)
    _record_start(context, attempt=attempt, deadline=ends, now=now)
    scratch = attempt_directory(
        Path(context.scratch_base),
        run=run.root,
        job=context.job,
        index=index,
        attempt=attempt,
        temporary=environment.get("TMPDIR", ""),
    )
    try:
        make_scratch(scratch, owner=owner(script_pid, deadline=ends), now=now)
    except (OSError, UserError) as err:
        _record_refusal(context, attempt=attempt, reason=f"no scratch directory: {err}", now=now)
        raise
    logs = run.attempt_logs(role, index=index, attempt=attempt)
    variables = {
        "PRORL_ATTEMPT": str(attempt),
        "PRORL_JOB_ID": context.job_id,
        "PRORL_DEADLINE": "" if ends is None else f"{ends:.0f}",
        "PRORL_SCRATCH": str(scratch),
        "PRORL_LOGS": str(logs),
    }
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def refuse(context: Context, *, line: str, now: float) -> None:
    """Records an attempt that ended before its command: a line of `site.setup` failed."""
    attempt = claim_attempt(context.run, context.role, index=context.index)
    _record_start(context, attempt=attempt, deadline=None, now=now)
    reason = f"site.setup failed on {socket.gethostname()}: {' '.join(line.split())}"
    print(f"prorl-hpc: {reason}", file=sys.stderr)
    _record_refusal(context, attempt=attempt, reason=reason, now=now)


def _record_start(context: Context, *, attempt: int, deadline: float | None, now: float) -> None:
    run, role, index = context.run, context.role, context.index
    entry = ledger.Start(
        time=now,
        job=context.job,
        role=role,
        index=index,
        attempt=attempt,
        job_id=context.job_id,
        host=socket.gethostname(),
        deadline=deadline,
        progress=read_progress(run, role, index=index),
    )
    publish(run.attempt_start(role, index=index, attempt=attempt), data=msgspec.json.encode(entry))
    ledger.append(run.ledger, entry=entry)


def _record_refusal(context: Context, *, attempt: int, reason: str, now: float) -> None:
    entry = ledger.Exit(
        time=now,
        job=context.job,
        index=context.index,
        attempt=attempt,
        code=EXIT_USER,
        next=Next.failed,
        reason=reason,
    )
    _record_exit(context, entry)


def _record_exit(context: Context, entry: ledger.Exit) -> None:
    path = context.run.attempt_exit(context.role, index=context.index, attempt=entry.attempt)
    publish(path, data=msgspec.json.encode(entry))
    ledger.append(context.run.ledger, entry=entry)


def past_attempts(run: RunDirectory, role: str, *, index: int, attempt: int) -> list[Attempt]:
    """The attempts up to `attempt` since the user last resumed, oldest first."""
    try:
        first = int(run.resumed(role, index=index).read_text()) + 1
    except (OSError, ValueError):
        first = 1
    attempts = []
    for number in range(first, attempt + 1):
        try:
            data = run.attempt_start(role, index=index, attempt=number).read_bytes()
            start = msgspec.json.decode(data, type=ledger.Start)
        except (OSError, msgspec.DecodeError):
            continue
        try:
            data = run.attempt_exit(role, index=index, attempt=number).read_bytes()
            asked = msgspec.json.decode(data, type=ledger.Exit).asked
        except (OSError, msgspec.DecodeError):
            asked = ""
        attempts.append(Attempt(progress_at_start=start.progress, asked=asked))
    return attempts


def record_end(
    context: Context, *, attempt: int, code: int, asked: str, cancelled: str = "", now: float
) -> Decision:
    """Decides what follows the attempt and records it with its reason."""
    run, role, index = context.run, context.role, context.index
    progress = read_progress(run, role, index=index)
    attempts = past_attempts(run, role, index=index, attempt=attempt)
    decision = decide(
        Ending(
            code=code,
            asked=asked,
            cancelled=cancelled or why_not(run, context.job, index=index),
            attempts_without_progress=without_progress(attempts, progress=progress),
            max_attempts_without_progress=context.max_attempts_without_progress,
        )
    )
    entry = ledger.Exit(
        time=now,
        job=context.job,
        index=index,
        attempt=attempt,
        code=code,
        asked=asked,
        next=decision.next,
        reason=decision.reason,
        progress=progress,
    )
    _record_exit(context, entry)
    return decision


def action(decision: Decision, *, context: Context, asked: str) -> str:
    """The word that the script acts on."""
    if decision.next in (Next.finished, Next.cancelled):
        return "finished"
    if decision.next is not Next.again:
        return "failed"
    if context.job_id.startswith(LOCAL):
        return "restart"
    if context.on_preempt == "cancel":
        return "resubmit"
    return "wait" if asked == TERMINATE else "requeue"  # Slurm requeues preempted jobs itself


def end(context: Context, *, code: int, asked: str, environment: Mapping[str, str]) -> str:
    """Records the end of the attempt and returns the word that the script acts on."""
    attempt = int(environment["PRORL_ATTEMPT"])
    cancelled = ""
    if asked == TERMINATE and environment.get("SLURM_JOB_ID"):
        cancelled = slurm.cancelled_by_hand(environment["SLURM_JOB_ID"])
    now = time.time()
    decision = record_end(
        context, attempt=attempt, code=code, asked=asked, cancelled=cancelled, now=now
    )
    remove_scratch(Path(environment["PRORL_SCRATCH"]))
    word = action(decision, context=context, asked=asked)
    if word == "requeue":
        _requeued(context, attempt=attempt, new_id=context.job_id, how=word)
    print(f"prorl-hpc: attempt {attempt} ended: {decision.reason}; next: {word}", file=sys.stderr)
    return word


def resubmit(context: Context, *, script: Path, environment: Mapping[str, str]) -> str:
    """Submits the script again for this index alone; returns the new job's id."""
    task = environment.get("SLURM_ARRAY_TASK_ID")
    new_id = slurm.submit(script, options=[f"--array={task}"] if task else [])
    new_id += f"_{task}" if task else ""
    attempt = int(environment["PRORL_ATTEMPT"])
    _requeued(context, attempt=attempt, new_id=new_id, how="resubmit")
    return new_id


def _requeued(context: Context, *, attempt: int, new_id: str, how: str) -> None:
    entry = ledger.Requeue(
        time=time.time(),
        job=context.job,
        index=context.index,
        attempt=attempt,
        job_id=new_id,
        how=how,
    )
    ledger.append(context.run.ledger, entry=entry)


def _scratch_here(environment: Mapping[str, str], *, remove: bool) -> None:
    """This node's directory of a job of several nodes."""
    scratch = Path(environment["PRORL_SCRATCH"])
    if remove:
        remove_scratch(scratch)
        return
    ends = environment.get("PRORL_DEADLINE", "")
    deadline = float(ends) if ends.isdigit() else None
    make_scratch(scratch, owner=owner(None, deadline=deadline), now=time.time())


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hpc.start", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    beginning = commands.add_parser("begin", help="claim an attempt; prints shell text")
    beginning.add_argument("--script", type=int, help="process id of the script")
    ending = commands.add_parser("end", help="record how the command ended; prints what follows")
    ending.add_argument("--code", type=int, required=True)
    ending.add_argument("--asked", default="")
    refusal = commands.add_parser("refuse", help="record that the site's setup failed")
    refusal.add_argument("failed", metavar="LINE")
    scratch = commands.add_parser("scratch", help="make this node's scratch directory")
    scratch.add_argument("--remove", action="store_true")
    again = commands.add_parser("resubmit", help="sbatch the script again, for this index")
    again.add_argument("script", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs one step of a job's script; the exit code is the script's to judge."""
    options = _arguments(argv)
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # Slurm signals all of a job; the record goes first
    try:
        context = Context.from_environment(os.environ)
        if options.command == "begin":
            text = begin(
                context, environment=os.environ, now=time.time(), script_pid=options.script
            )
            sys.stdout.write(text)
        elif options.command == "end":
            print(end(context, code=options.code, asked=options.asked, environment=os.environ))
        elif options.command == "refuse":
            refuse(context, line=options.failed, now=time.time())
        elif options.command == "scratch":
            _scratch_here(os.environ, remove=options.remove)
        else:
            resubmit(context, script=options.script, environment=os.environ)
    except (HpcError, OSError) as err:
        print(f"prorl-hpc: {err}", file=sys.stderr)
        return EXIT_USER if isinstance(err, UserError) else EXIT_CONTINUE
    return 0


if __name__ == "__main__":
    sys.exit(main())
