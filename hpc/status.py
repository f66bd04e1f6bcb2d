"""What every job of a run is doing: the ledger first, Slurm's answers where it gives any.

Changes nothing. A job that nobody knows is `unknown`, never a success.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hpc import ledger, local, slurm
from hpc.attempts import Next
from hpc.errors import SubmitError
from hpc.ledger import History
from hpc.plan import Job
from hpc.prepare import indexes_of, load
from hpc.rundir import RunDirectory
from hpc.site import Backend


class Phase(StrEnum):
    """What a job (or one index of an array) is doing."""

    pending = "pending"
    running = "running"
    finished = "finished"
    failed = "failed"
    cancelled = "cancelled"
    preempted = "preempted"
    unknown = "unknown"


ALIVE = (Phase.pending, Phase.running, Phase.preempted)
"""Phases in which nothing has to be started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """One index of one job."""

    job: str
    role: str
    index: int
    phase: Phase
    reason: str
    """One sentence: why it waits, failed, or isn't known."""
    job_id: str
    """Empty where nothing was submitted."""
    attempt: int
    """0 before the first."""
    host: str
    started: float | None
    """Unix seconds, of the last attempt."""
    ended: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmView:
    """What Slurm answered, by job id; `trouble` says why it didn't."""

    rows: Mapping[str, slurm.QueueRow]
    trouble: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """The newest submission that covers an index."""

    job_id: str
    time: float
    token: str


PENDING_STATES = (
    "PENDING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
)
RUNNING_STATES = (
    "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT",
    "RESIZING",
)  # fmt: skip
_FAILED = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "REVOKED")

_REASONS = {
    "DependencyNeverSatisfied": "waits for a job that ended without starting; it will never run: "
    "cancel the run and resume it",
    "AssocGrpCpuLimit": "the account's CPU limit is used up (AssocGrpCpuLimit)",
    "PartitionTimeLimit": "asks for more time than the partition gives (PartitionTimeLimit)",
    "BeginTime": "requeued, waits for its begin time",
}


def states(run_directory: Path | RunDirectory) -> list[JobState]:
    """The state of every index of every job, in start order.

    Raises RunNotFound. Trouble with Slurm is told in the reasons, not raised.
    """
    run = _run(run_directory)
    plan, site = load(run)
    entries = ledger.read(run.ledger)
    histories = ledger.fold(entries)
    submissions = newest_submissions(entries)
    if site.backend is Backend.local:
        alive = local.supervisor_pid(run) is not None
        view = None
    else:
        alive = False
        ids = sorted({sub.job_id.split("_")[0] for sub in submissions.values()})
        view = ask_slurm(ids, accounting=site.accounting)
    found = []
    for job in plan.ordered():
        known = {index for name, index in {*histories, *submissions} if name == job.name}
        for index in sorted({*indexes_of(run, job), *known}):
            history = histories.get((job.name, index), History(job=job.name, index=index))
            sub = submissions.get((job.name, index))
            if view is None:
                found.append(_local_state(run, job, history, sub, alive=alive))
            else:
                prefix = f"prorl-hpc run={plan.run} job={job.name}"
                found.append(_slurm_state(run, job, history, sub, view=view, comment=prefix))
    return found


def trouble(found: Sequence[JobState]) -> str:
    """Why Slurm couldn't be asked; empty where it answered, or wasn't needed."""
    reasons = (s.reason for s in found if s.phase is Phase.unknown and "squeue" in s.reason)
    return next(reasons, "")


def _run(where: Path | RunDirectory) -> RunDirectory:
    return where if isinstance(where, RunDirectory) else RunDirectory(Path(where))


def newest_submissions(entries: ledger.Ledger) -> dict[tuple[str, int], Submission]:
    """The newest Slurm job of each (job, index): by submission, resubmission or start."""
    found: dict[tuple[str, int], Submission] = {}
    intended: dict[str, int] = {}
    changed: dict[tuple[str, int], int] = {}
    for position, entry in enumerate(entries.entries):
        if isinstance(entry, ledger.Intent):
            intended[entry.token] = position
        elif isinstance(entry, ledger.Submit):
            for index in ledger.parse_indexes(entry.indexes):
                if changed.get((entry.job, index), -1) > intended.get(entry.token, position):
                    continue  # recorded late: the job has begun, or has a successor, since
                task = "" if entry.indexes is None else f"_{index - entry.index_offset}"
                found[entry.job, index] = Submission(
                    job_id=entry.job_id + task, time=entry.time, token=entry.token
                )
        elif isinstance(entry, (ledger.Start, ledger.Requeue)):
            changed[entry.job, entry.index] = position
            before = found.get((entry.job, entry.index))
            if before is not None and before.job_id == entry.job_id:
                continue
            token = entry.token if isinstance(entry, ledger.Requeue) else ""
            found[entry.job, entry.index] = Submission(
                job_id=entry.job_id, time=entry.time, token=token
            )
    return found


def ask_slurm(job_ids: list[str], *, accounting: bool) -> SlurmView:
    """One squeue for all jobs, and one sacct for those that the controller forgot."""
    if not job_ids:
        return SlurmView(rows={}, trouble="")
    rows: dict[str, slurm.QueueRow] = {}
    try:
        queued = slurm.queue(job_ids)
    except SubmitError as err:
        return SlurmView(rows={}, trouble=str(err))
    rows.update((row.job_id, row) for row in queued)
    present = {row.job_id.split("_")[0] for row in queued}
    absent = [job_id for job_id in job_ids if job_id not in present]
    if absent and accounting:
        try:
            rows.update((row.job_id, row) for row in slurm.accounting(absent))
        except SubmitError:  # off, or down: the ledger has to do
            return SlurmView(rows=rows, trouble="")
    return SlurmView(rows=rows, trouble="")


def belongs(row: slurm.QueueRow, *, sub: Submission, comment: str) -> bool:
    """Whether the row is our job, and not another that got the same id later."""
    if row.comment.startswith("prorl-hpc "):
        return row.comment == comment or (
            row.comment.startswith(f"{comment} ")
            and (not sub.token or row.comment.endswith(f"token={sub.token}"))
        )
    day = 86400.0  # clocks of login node and controller may differ by much less
    return row.submitted is None or row.submitted <= sub.time + day


def _slurm_state(
    run: RunDirectory,
    job: Job,
    history: History,
    sub: Submission | None,
    *,
    view: SlurmView,
    comment: str,
) -> JobState:
    if sub is None:
        phase = Phase.cancelled if history.cancelled else Phase.pending
        return _state(job, history, phase=phase, reason="not submitted", job_id="")
    row = view.rows.get(sub.job_id)
    if row is not None and not belongs(row, sub=sub, comment=comment):
        row = None
    if row is None:
        phase, reason = _by_ledger(run, job, history)
        if phase is Phase.unknown:
            why = view.trouble or f"Slurm doesn't know job {sub.job_id} any more"
            reason = f"{why}; {reason}"
        return _state(job, history, phase=phase, reason=reason, job_id=sub.job_id)
    phase, reason = _by_row(row, history)
    return _state(job, history, phase=phase, reason=reason, job_id=sub.job_id, host=row.host)


def _by_row(row: slurm.QueueRow, history: History) -> tuple[Phase, str]:
    """Slurm's word, where the ledger has no better one."""
    state = row.state.rstrip("+")
    if state in PENDING_STATES:
        return Phase.pending, _REASONS.get(row.reason, row.reason)
    if state in RUNNING_STATES:
        return Phase.running, _unheard(row, history) if state == "RUNNING" else state.lower()
    end = history.last_exit
    if state == "PREEMPTED" and not row.remembered:
        return Phase.preempted, "preempted by a job of higher priority"
    if state == "COMPLETED" and end is None:
        if history.cancelled:
            return Phase.cancelled, history.cancelled
        return Phase.unknown, "Slurm says COMPLETED, but the job left no record of its end"
    if end is not None and end.next != Next.again:
        return _by_exit(end)
    if state.startswith("CANCELLED"):
        return Phase.cancelled, "cancelled"
    if state == "PREEMPTED":
        return Phase.failed, "preempted by a job of higher priority, and not queued again"
    if state in _FAILED:
        return Phase.failed, state if end is None else f"{state}: {end.reason}"
    return Phase.unknown, f"Slurm says {row.state}"


def _unheard(row: slurm.QueueRow, history: History) -> str:
    """What is odd about a job that runs: Slurm may have begun it, and its script never have."""
    end = history.last_exit
    if history.last_start is not None and (end is None or end.next != Next.again):
        return ""
    seconds = "" if row.started is None else f" {max(0.0, time.time() - row.started):.0f} s ago"
    return f"Slurm started it{seconds}; its script hasn't said a word yet"


def _by_exit(end: ledger.Exit) -> tuple[Phase, str]:
    if end.next == Next.finished:
        return Phase.finished, end.reason
    if end.next == Next.cancelled:
        return Phase.cancelled, end.reason
    return Phase.failed, end.reason


def _by_ledger(run: RunDirectory, job: Job, history: History) -> tuple[Phase, str]:
    end = history.last_exit
    if end is not None and end.next != Next.again:
        return _by_exit(end)
    if history.cancelled:
        return Phase.cancelled, history.cancelled
    if end is not None:
        return Phase.unknown, f"asked for another attempt ({end.reason})"
    if history.last_start is None:
        return Phase.unknown, "it never started"
    attempt = history.last_start.attempt
    path = run.attempt_logs(job.role, index=history.index, attempt=attempt) / "out.log"
    try:
        seconds = max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return Phase.unknown, "no record of its end"
    return Phase.unknown, f"no record of its end; last output {seconds:.0f} s ago"


def _local_state(
    run: RunDirectory, job: Job, history: History, sub: Submission | None, *, alive: bool
) -> JobState:
    job_id = sub.job_id if sub is not None else ""
    end, start = history.last_exit, history.last_start
    if end is not None and end.next != Next.again:
        phase, reason = _by_exit(end)
    elif history.cancelled:
        phase, reason = Phase.cancelled, history.cancelled
    elif sub is None:
        phase, reason = Phase.pending, "not submitted"
    elif not alive:
        phase, reason = _by_ledger(run, job, history)
        reason = f"the run's supervisor is gone: {reason}; `prorl-hpc resume` goes on"
    elif end is not None:
        phase, reason = Phase.pending, f"starts again: {end.reason}"
    elif start is None:
        phase, reason = Phase.pending, "starts"
    else:
        phase, reason = Phase.running, ""
    return _state(job, history, phase=phase, reason=reason, job_id=job_id)


def _state(
    job: Job, history: History, *, phase: Phase, reason: str, job_id: str, host: str = ""
) -> JobState:
    start, end = history.last_start, history.last_exit
    return JobState(
        job=job.name,
        role=job.role,
        index=history.index,
        phase=phase,
        reason=reason,
        job_id=job_id,
        attempt=start.attempt if start is not None else 0,
        host=start.host if start is not None else host,
        started=start.time if start is not None else None,
        ended=end.time if end is not None else None,
    )
