"""Whether the learner of a run has ended for good, by the ledger. Reads one file, asks nobody."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from hpc import ledger
from hpc.attempts import Next
from prorl_hpc.run import Run

ROLE = "learner"
LOOK_SECONDS = 2.0
"""The ledger, a file on the shared file system, is looked at no more often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerEnd:
    """Why nothing is left to do for the other roles."""

    reason: str
    finished: bool
    """All steps are done; False: it failed, was cancelled or used up its attempts."""


def learner_end(run: Run) -> LearnerEnd | None:
    """How the learner ended for good; None while it goes on, may, or was never started.

    An end before the user's last resume doesn't count: the next attempt may not have begun yet.
    """
    end: LearnerEnd | None = None
    jobs: set[str] = set()
    for entry in ledger.read(run.ledger).entries:
        if isinstance(entry, ledger.Start) and entry.role == ROLE:
            jobs.add(entry.job)
            end = None
        elif isinstance(entry, ledger.Resume | ledger.Submit) and entry.job in jobs:
            end = None
        elif isinstance(entry, ledger.Exit) and entry.job in jobs:
            end = _end_of(entry)
    return end


class LearnerWatch:
    """`learner_end` for one who asks all the time: reads the ledger only when it has grown."""

    def __init__(self, run: Run, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._looked = -float("inf")
        self._size = -1
        self._end: LearnerEnd | None = None

    def __call__(self) -> LearnerEnd | None:
        now = self._clock()
        if now - self._looked < LOOK_SECONDS:
            return self._end
        self._looked = now
        try:
            size = self._run.ledger.stat().st_size
        except OSError:
            return self._end
        if size != self._size:
            self._size = size
            self._end = learner_end(self._run)
        return self._end


def _end_of(entry: ledger.Exit) -> LearnerEnd | None:
    if entry.next == Next.again:
        return None
    if entry.next == Next.finished:
        return LearnerEnd(reason="the run is finished", finished=True)
    return LearnerEnd(reason=f"the learner ended for good: {entry.reason}", finished=False)
