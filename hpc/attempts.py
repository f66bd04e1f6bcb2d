"""What the end of an attempt means, and how many attempts made no progress. Starts nothing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpc.errors import EXIT_CONTINUE, EXIT_DONE, EXIT_USER

_FROM_OUTSIDE = {
    1: "SIGHUP",
    2: "SIGINT",
    9: "SIGKILL",
    10: "SIGUSR1",
    12: "SIGUSR2",
    15: "SIGTERM",
}
"""Signals that others send; the rest (SIGSEGV, SIGABRT, ...) are the program's own faults."""

WALLTIME = "USR2"
"""What the scheduler sends ahead of the walltime."""

TERMINATE = "TERM"
"""What preemption, cancelling and the end of the walltime send."""


HOST_FAILURES = 2
"""So many attempts that end on one node without progress are held against the node."""

MAX_REFUSALS = 2
"""Nodes that may refuse a job in a row before it fails: then it is no single node's fault."""


class Next(StrEnum):
    """What follows an attempt."""

    finished = "finished"
    again = "again"
    failed = "failed"
    """An error of the program: starting again would not help."""
    exhausted = "exhausted"
    """Attempts that made no progress."""
    cancelled = "cancelled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How an attempt ended, and what surrounded it."""

    code: int
    """Exit code as a shell reports it: 128 + n for signal n."""
    asked: str
    """First signal that the job got: `USR2`, `TERM`, or empty."""
    cancelled: str
    """Why no attempt shall follow (the run was cancelled, scaled down); else empty."""
    attempts_without_progress: int
    """In a row, this one included."""
    max_attempts_without_progress: int
    """0 for a job that doesn't come back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What follows, and the sentence that the ledger keeps."""

    next: Next
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What counting needs to know of one attempt."""

    progress_at_start: float | None
    asked: str
    host: str = ""
    refused: bool = False
    """Whether it ended before its command, for want of something on its node."""


def describe(code: int) -> str:
    """An exit code in words."""
    if code == EXIT_CONTINUE:
        return "asked for another attempt"
    if code == EXIT_USER:
        return "bad input (exit code 2)"
    if code > 128:
        return f"killed by {_FROM_OUTSIDE.get(code - 128, f'signal {code - 128}')}"
    return f"exit code {code}"


def decide(ending: Ending) -> Decision:
    """What follows this ending.

    An application error never comes back. Preemption (SIGTERM) is no fault of the job and never
    uses up the chain; the walltime, kills and requests for another attempt do, unless the job
    made progress.
    """
    words = describe(ending.code)
    if ending.code == EXIT_DONE:
        return Decision(next=Next.finished, reason="done")
    if ending.cancelled:
        return Decision(next=Next.cancelled, reason=ending.cancelled)
    asked = {WALLTIME: "walltime", TERMINATE: "terminated from outside"}.get(ending.asked)
    outside = ending.code == EXIT_CONTINUE or (ending.code - 128) in _FROM_OUTSIDE
    if ending.code == EXIT_USER or not (outside or asked):
        return Decision(next=Next.failed, reason=words)
    reason = f"{asked}: {words}" if asked else words
    if ending.max_attempts_without_progress == 0:
        return Decision(next=Next.failed, reason=f"{reason}; the job doesn't come back by plan")
    if (
        ending.asked != TERMINATE
        and ending.attempts_without_progress >= ending.max_attempts_without_progress
    ):
        count = ending.attempts_without_progress
        return Decision(
            next=Next.exhausted, reason=f"{reason}; {count} attempts in a row made no progress"
        )
    return Decision(next=Next.again, reason=reason)


def without_progress(attempts: Sequence[Attempt], *, progress: float | None) -> int:
    """How many of the latest `attempts` (oldest first) began at today's `progress`.

    Attempts that were terminated from outside don't count.
    """
    count = 0
    for attempt in reversed(attempts):
        if attempt.progress_at_start != progress:
            break
        count += attempt.asked != TERMINATE
    return count


def bad_hosts(attempts: Sequence[Attempt], *, progress: float | None) -> tuple[str, ...]:
    """Nodes that the next attempt had better avoid, sorted.

    Those that refused one of the latest `attempts` (oldest first), and those on which
    `HOST_FAILURES` of them ended unasked, all without progress.
    """
    failures: Counter[str] = Counter()
    for attempt in reversed(attempts):
        if attempt.progress_at_start != progress:
            break
        if attempt.host and not attempt.asked:
            failures[attempt.host] += HOST_FAILURES if attempt.refused else 1
    return tuple(sorted(host for host, count in failures.items() if count >= HOST_FAILURES))


def restart_delay_seconds(failures: int) -> float:
    """Back-off before another attempt on one machine: 0.2 s doubled, at most 30 s."""
    return float(min(30.0, 0.2 * 2 ** min(failures, 10)))
