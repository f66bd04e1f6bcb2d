"""Waiting for space on a full disk. Knows errors and clocks; nothing of what is written.

A full disk (or quota) is often one for minutes: other jobs' files go, an admin is asked. Training
pauses, says so, and goes on; it ends when a stop is wanted or the wait has lasted too long.
"""

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from prorl_hpc.learner.distributed import Ranks

T = TypeVar("T")

FULL = (errno.ENOSPC, errno.EDQUOT)
RETRY_SECONDS = 5.0
POLL_SECONDS = 0.2


class DiskError(OSError):
    """An OSError in words of ours that keeps its number, also on its way to another rank."""

    def __init__(self, text: str, number: int | None = None) -> None:
        super().__init__(text)
        self.errno = number

    def __reduce__(self) -> tuple[type["DiskError"], tuple[str, int | None]]:
        return type(self), (str(self), self.errno)

    @classmethod
    def of(cls, err: BaseException, text: str) -> "DiskError":
        """`text: err`, with the number of what led to it."""
        full = full_disk(err)
        number = full.errno if full is not None else getattr(err, "errno", None)
        return cls(f"{text}: {err}", number)


def full_disk(err: BaseException | None) -> OSError | None:
    """The error that says that the disk is full: this one, or one that led to it; else None."""
    seen: set[int] = set()
    while err is not None and id(err) not in seen:
        seen.add(id(err))
        if isinstance(err, OSError) and err.errno in FULL:
            return err
        err = err.__cause__ or err.__context__
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class SpaceWait:
    """Tries again while the disk is full."""

    limit_seconds: float
    """No space for so long: the error is raised, and another attempt may have better luck."""
    stopping: Callable[[], bool]
    """Whether a stop is wanted. Asked on rank 0."""
    report: Callable[[str], None]
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def write(self, what: str, body: Callable[[], T], *, ranks: Ranks | None = None) -> T:
        """Runs `body` until it has space.

        With `ranks`, all of them call this together, and a full disk is an error of `body` on all.
        Raises what `body` raises otherwise, and OSError when the wait is over.
        """
        begun: float | None = None
        while True:
            try:
                value = body()
            except OSError as err:
                if full_disk(err) is None:
                    raise
                begun = self.now() if begun is None else begun
                first = ranks is None or ranks.is_first
                goes_on = self._pause(what, err, begun=begun) if first else False
                if not (goes_on if ranks is None else ranks.broadcast(goes_on)):
                    raise
            else:
                if begun is not None and (ranks is None or ranks.is_first):
                    seconds = self.now() - begun
                    self.report(f"{what} is written after {seconds:.0f} s without space")
                return value

    def _pause(self, what: str, err: OSError, *, begun: float) -> bool:
        """Waits a little; False when there is no use, or no time, to go on."""
        left = begun + self.limit_seconds - self.now()
        if left <= 0 or self.stopping():
            return False
        self.report(
            f"the disk is full; {what} waits, and training with it, for at most {left:.0f} s more: "
            f"{err}"
        )
        until = self.now() + min(RETRY_SECONDS, left)
        while self.now() < until:
            if self.stopping():
                return False
            self.sleep(POLL_SECONDS)
        return True
