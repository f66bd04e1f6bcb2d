"""What a job's script does around its command: claims the attempt, records its end.

Called by the scripts as `python -m hpc.start begin|end|refuse|scratch|resubmit`. Knows what an end
means only through `hpc.attempts`; runs no command of the job itself.
"""

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc import ledger, slurm
from hpc.again import avoided, follow_up, refused, requeued
from hpc.attempts import (
    TERMINATE,
    Decision,
    Ending,
    Next,
    decide,
    without_progress,
)
from hpc.context import LOCAL, Context, deadline, node
from hpc.errors import EXIT_CONTINUE, EXIT_USER, HpcError, UserError
from hpc.journal import (
    claim_attempt,
    past_attempts,
    read_progress,
    record_exit,
    record_start,
    superseded,
    why_not,
)
from hpc.scratch import attempt_directory, caches, make_scratch, owner, remove_scratch


def begin(
    context: Context,
    *,
    script: Path,
    environment: Mapping[str, str],
    now: float,
    pid: int | None = None,
) -> str:
    """Claims an attempt and records its start. Returns shell text for the script's `eval`."""
    reason = why_not(context.run, context.job, index=context.index)
    if reason:
        return f"exit 0 # {reason}\n"
    run, role, index = context.run, context.role, context.index
    attempt = claim_attempt(run, role, index=index)
    ends = deadline(context, environment=environment, now=now)
    _record_start(context, attempt=attempt, environment=environment, deadline=ends, now=now)
    scratch = attempt_directory(
        Path(context.scratch_base),
        run=run.root,
        job=context.job,
        index=index,
        attempt=attempt,
        temporary=environment.get("TMPDIR", ""),
    )
    try:
        make_scratch(scratch, owner=owner(pid, deadline=ends), now=now)
    except (OSError, UserError) as err:
        refused(
            context,
            attempt=attempt,
            reason=f"no scratch directory on {node(environment)}: {err}",
            script=script,
            environment=environment,
            now=now,
        )
        raise
    logs = run.attempt_logs(role, index=index, attempt=attempt)
    variables = {
        "PRORL_ATTEMPT": str(attempt),
        "PRORL_JOB_ID": context.job_id,
        "PRORL_DEADLINE": "" if ends is None else f"{ends:.0f}",
        "PRORL_SCRATCH": str(scratch),
        "PRORL_LOGS": str(logs),
        **caches(scratch, environment=environment),
    }
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def refuse(
    context: Context, *, line: str, script: Path, environment: Mapping[str, str], now: float
) -> None:
    """Records an attempt that ended before its command: a line of `site.setup` failed."""
    attempt = claim_attempt(context.run, context.role, index=context.index)
    _record_start(context, attempt=attempt, environment=environment, deadline=None, now=now)
    reason = f"site.setup failed on {node(environment)}: {' '.join(line.split())}"
    print(f"prorl-hpc: {reason}", file=sys.stderr)
    refused(
        context, attempt=attempt, reason=reason, script=script, environment=environment, now=now
    )


def _record_start(
    context: Context,
    *,
    attempt: int,
    environment: Mapping[str, str],
    deadline: float | None,
    now: float,
) -> None:
    entry = ledger.Start(
        time=now,
        job=context.job,
        role=context.role,
        index=context.index,
        attempt=attempt,
        job_id=context.job_id,
        host=node(environment),
        deadline=deadline,
        progress=read_progress(context.run, context.role, index=context.index),
    )
    record_start(context.run, entry)


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
            cancelled=cancelled
            or why_not(run, context.job, index=index)
            or superseded(run, role, index=index, attempt=attempt),
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
    record_exit(run, role, entry)
    return decision


def action(decision: Decision, *, context: Context, asked: str, avoid: Sequence[str] = ()) -> str:
    """The word that the script acts on; only a new job can `avoid` nodes."""
    if decision.next in (Next.finished, Next.cancelled):
        return "finished"
    if decision.next is not Next.again:
        return "failed"
    if context.job_id.startswith(LOCAL):
        return "restart"
    if context.on_preempt == "cancel" or avoid:
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
    avoid = avoided(context, attempt=attempt, environment=environment)
    word = action(decision, context=context, asked=asked, avoid=avoid)
    if word == "requeue":
        requeued(context, attempt=attempt, new_id=context.job_id, how=word)
    print(f"prorl-hpc: attempt {attempt} ended: {decision.reason}; next: {word}", file=sys.stderr)
    return word


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
    beginning.add_argument("--pid", type=int, help="process id of the script")
    beginning.add_argument("script", type=Path)
    ending = commands.add_parser("end", help="record how the command ended; prints what follows")
    ending.add_argument("--code", type=int, required=True)
    ending.add_argument("--asked", default="")
    refusal = commands.add_parser("refuse", help="record that the site's setup failed")
    refusal.add_argument("script", type=Path)
    refusal.add_argument("line", metavar="LINE")
    scratch = commands.add_parser("scratch", help="make this node's scratch directory")
    scratch.add_argument("--remove", action="store_true")
    again = commands.add_parser("resubmit", help="sbatch the script again, for this index")
    again.add_argument("script", type=Path)
    return parser.parse_args(argv)


def _act(options: argparse.Namespace, context: Context, *, environment: Mapping[str, str]) -> None:
    now = time.time()
    if options.command == "begin":
        text = begin(
            context, script=options.script, environment=environment, now=now, pid=options.pid
        )
        sys.stdout.write(text)
    elif options.command == "end":
        print(end(context, code=options.code, asked=options.asked, environment=environment))
    elif options.command == "refuse":
        refuse(context, line=options.line, script=options.script, environment=environment, now=now)
    elif options.command == "scratch":
        _scratch_here(environment, remove=options.remove)
    else:
        attempt = int(environment["PRORL_ATTEMPT"])
        follow_up(context, script=options.script, attempt=attempt, environment=environment)


def main(argv: list[str] | None = None) -> int:
    """Runs one step of a job's script; the exit code is the script's to judge."""
    options = _arguments(argv)
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # Slurm signals all of a job; the record goes first
    try:
        _act(options, Context.from_environment(os.environ), environment=os.environ)
    except (HpcError, OSError) as err:
        print(f"prorl-hpc: {err}", file=sys.stderr)
        return EXIT_USER if isinstance(err, UserError) else EXIT_CONTINUE
    return 0


if __name__ == "__main__":
    sys.exit(main())
