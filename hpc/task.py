"""One task of a run on one machine, and how its end gets into the ledger. Starts nothing.

Scripts record their own ends; what is recorded here is the end of a script that was killed, or
that failed before its attempt began.
"""

import os
import subprocess
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from hpc import ledger
from hpc.attempts import Ending, Next, decide
from hpc.context import Context
from hpc.journal import claim_attempt, record_start
from hpc.plan import Job
from hpc.rundir import RunDirectory
from hpc.site import Site
from hpc.start import record_end


class Phase(StrEnum):
    """Where a task is."""

    waiting = "waiting"
    running = "running"
    finished = "finished"
    failed = "failed"
    stopped = "stopped"


@dataclass(kw_only=True, slots=True)
class Task:
    """One index of one job. All times are monotonic seconds."""

    job: Job
    index: int
    script: Path
    array_task: int
    phase: Phase = Phase.waiting
    process: "subprocess.Popen[bytes] | None" = None
    token: str = ""
    """Job id of the running attempt."""
    started: float = 0.0
    failures: int = 0
    """Short-lived attempts in a row."""
    due: float = 0.0
    """When the next attempt may start."""
    warn_at: float = float("inf")
    kill_at: float = float("inf")
    stop_reason: str = ""

    @property
    def over(self) -> bool:
        return self.phase in (Phase.finished, Phase.failed, Phase.stopped)


def outcome(run: RunDirectory, site: Site, task: Task, *, code: int) -> tuple[Next, str]:
    """What the script decided; or, where it couldn't, what its end means."""
    role, index = task.job.role, task.index
    numbers = sorted(
        (
            int(path.name[8:])
            for path in run.job_logs(role, index=index).glob("attempt-*")
            if path.name[8:].isdigit()
        ),
        reverse=True,
    )
    # not simply the newest: another copy of the task may have claimed one meanwhile
    latest = next((n for n in numbers if _started_by(run, task, attempt=n)), 0)
    if latest:
        try:
            data = run.attempt_exit(role, index=index, attempt=latest).read_bytes()
            decided = msgspec.json.decode(data, type=ledger.Exit)
            return Next(decided.next), decided.reason
        except (OSError, msgspec.DecodeError):
            return _record(run, site, task, attempt=latest, code=code)
    if code == 0:  # `begin` found that nothing is wanted any more
        return Next.cancelled, "not started"
    return _record(run, site, task, attempt=ledger.NO_ATTEMPT, code=code)


def unrecorded(task: Task, *, code: int) -> Next:
    """What an end means where nothing can be written."""
    ending = Ending(
        code=code,
        asked="TERM" if task.stop_reason else "",
        cancelled=task.stop_reason,
        attempts_without_progress=0,
        max_attempts_without_progress=1 if task.job.restarts else 0,
    )
    return decide(ending).next


def _started_by(run: RunDirectory, task: Task, *, attempt: int) -> bool:
    path = run.attempt_start(task.job.role, index=task.index, attempt=attempt)
    try:
        start = msgspec.json.decode(path.read_bytes(), type=ledger.Start)
    except (OSError, msgspec.DecodeError):
        return False
    return start.job_id == task.token


def _record(
    run: RunDirectory, site: Site, task: Task, *, attempt: int, code: int
) -> tuple[Next, str]:
    job = task.job
    if attempt == ledger.NO_ATTEMPT:  # an attempt of its own, so that its end is counted
        attempt = claim_attempt(run, job.role, index=task.index)
        _record_start(run, task, attempt=attempt)
    context = Context(
        run=run,
        job=job.name,
        role=job.role,
        index=task.index,
        job_id=task.token,
        max_attempts_without_progress=(job.max_attempts_without_progress if job.restarts else 0),
        on_preempt="requeue",
        scratch_base=site.scratch,
        walltime_minutes=job.resources.walltime_minutes,
    )
    asked = "TERM" if task.stop_reason else ""
    decision = record_end(context, attempt=attempt, code=code, asked=asked, now=time.time())
    return decision.next, decision.reason


def _record_start(run: RunDirectory, task: Task, *, attempt: int) -> None:
    entry = ledger.Start(
        time=time.time(),
        job=task.job.name,
        role=task.job.role,
        index=task.index,
        attempt=attempt,
        job_id=task.token,
        host=os.uname().nodename,
    )
    record_start(run, entry)


def record_cancel(run: RunDirectory, task: Task, *, reason: str) -> None:
    """Notes that no attempt follows, and why."""
    indexes = None if task.job.array_size is None else str(task.index)
    entry = ledger.Cancel(time=time.time(), job=task.job.name, indexes=indexes, reason=reason)
    ledger.append(run.ledger, entry=entry)
