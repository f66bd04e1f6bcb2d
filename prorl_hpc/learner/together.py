"""Errors that every rank hears of. Knows ranks; nothing of what is done.

What one rank can't do (a full disk, a file that isn't there) would leave the others waiting in the
next collective until its time is up. Here the error is raised on all of them instead.
"""

import pickle
from collections.abc import Callable
from typing import TypeVar

from prorl_hpc.learner.distributed import Ranks, RanksError
from prorl_hpc.learner.space import DiskError

T = TypeVar("T")


def on_first(ranks: Ranks, body: Callable[[], T]) -> T:
    """Rank 0 does it; every rank gets the value, or the error raised.

    `body` must not hold a collective; its value must be one that can be sent.
    """
    if ranks.world == 1:
        return body()
    value: T | None = None
    mine: Exception | None = None
    if ranks.is_first:
        try:
            value = body()
        except Exception as err:
            mine = err
    value, sent = ranks.broadcast((value, _portable(mine, rank=0)))
    if mine is not None:
        raise mine
    if sent is not None:
        raise sent
    return value  # type: ignore[return-value]


def on_all(ranks: Ranks, body: Callable[[], T]) -> T:
    """Every rank does it; what goes wrong on one of them is raised on all.

    `body` must not hold a collective.
    """
    if ranks.world == 1:
        return body()
    value: T | None = None
    mine: Exception | None = None
    try:
        value = body()
    except Exception as err:
        mine = err
    agree(ranks, mine)
    return value  # type: ignore[return-value]


def agree(ranks: Ranks, mine: Exception | None) -> None:
    """Raises this rank's error, else that of the first rank that has one; on all ranks, or none."""
    found = ranks.gather(_portable(mine, rank=ranks.rank))
    if mine is not None:
        raise mine
    theirs = next((err for err in found if err is not None), None)
    if theirs is not None:
        raise theirs


def _portable(err: Exception | None, *, rank: int) -> Exception | None:
    """The error as another rank can raise it: of its own type where that can be sent."""
    if err is None:
        return None
    if isinstance(err, OSError):
        return DiskError(f"rank {rank}: {err}", err.errno)
    try:
        if type(pickle.loads(pickle.dumps(err))) is type(err):  # noqa: S301 - our own bytes
            return err
    except Exception:  # noqa: S110 - told below in words
        pass
    return RanksError(f"rank {rank}: {type(err).__name__}: {err}")
