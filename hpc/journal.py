"""What is kept of each attempt: its number, its start and its end. Decides nothing.

A start or an end stands in the attempt's own directory, for the scripts, and in the ledger, for
everybody else.
"""

import msgspec

from hpc import ledger
from hpc.attempts import Attempt, Next
from hpc.errors import EXIT_USER
from hpc.files import publish
from hpc.rundir import RunDirectory


def claim_attempt(run: RunDirectory, role: str, *, index: int) -> int:
    """The number of a new attempt: the first whose directory could be made.

    Two jobs that believe to be the same index thus never share a number.
    """
    run.job_logs(role, index=index).mkdir(parents=True, exist_ok=True)
    attempt = newest_attempt(run, role, index=index) + 1
    while True:
        try:
            run.attempt_logs(role, index=index, attempt=attempt).mkdir()
        except FileExistsError:
            attempt += 1
        else:
            return attempt


def newest_attempt(run: RunDirectory, role: str, *, index: int) -> int:
    """The highest number that was claimed; 0 before the first."""
    found = run.job_logs(role, index=index).glob("attempt-*")
    return max((int(path.name[8:]) for path in found if path.name[8:].isdigit()), default=0)


def superseded(run: RunDirectory, role: str, *, index: int, attempt: int) -> str:
    """Who has taken this attempt's place; empty where nobody has.

    A copy on a node that was cut off and came back must not call the job back from its successor.
    """
    newest = newest_attempt(run, role, index=index)
    return f"attempt {newest} has taken over" if newest > attempt else ""


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
        end = read_exit(run, role, index=index, attempt=number)
        attempts.append(
            Attempt(
                progress_at_start=start.progress,
                asked="" if end is None else end.asked,
                host=start.host,
                refused=end is not None and (end.code, end.next) == (EXIT_USER, Next.again),
            )
        )
    return attempts


def read_exit(run: RunDirectory, role: str, *, index: int, attempt: int) -> ledger.Exit | None:
    """How an attempt ended; None where that isn't recorded."""
    try:
        data = run.attempt_exit(role, index=index, attempt=attempt).read_bytes()
        return msgspec.json.decode(data, type=ledger.Exit)
    except (OSError, msgspec.DecodeError):
        return None


def record_start(run: RunDirectory, entry: ledger.Start) -> None:
    """Writes an attempt's start to its directory and to the ledger."""
    path = run.attempt_start(entry.role, index=entry.index, attempt=entry.attempt)
    publish(path, data=msgspec.json.encode(entry))
    ledger.append(run.ledger, entry=entry)


def record_exit(run: RunDirectory, role: str, entry: ledger.Exit) -> None:
    """Writes an attempt's end to its directory and to the ledger."""
    path = run.attempt_exit(role, index=entry.index, attempt=entry.attempt)
    publish(path, data=msgspec.json.encode(entry))
    ledger.append(run.ledger, entry=entry)
