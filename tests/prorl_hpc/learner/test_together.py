"""Errors that every rank hears of, and waits that all ranks share: two ranks as two threads.

The same over real process groups: `test_distributed`.
"""

import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch

from hpc.errors import UserError
from prorl_hpc.buffer.shard import ShardDamaged
from prorl_hpc.learner.distributed import Ranks, RanksError
from prorl_hpc.learner.space import DiskError, SpaceWait, full_disk
from prorl_hpc.learner.together import on_all, on_first

T = TypeVar("T")
SECONDS = 60.0


@dataclass
class Room:
    """Where the threads meet."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))
    values: list[Any] = field(default_factory=lambda: [None, None])


@dataclass(frozen=True, kw_only=True)
class ThreadRank(Ranks):
    """A rank whose collectives go through a room; a missing partner breaks them."""

    room: Room

    def gather(self, value: T) -> list[T]:
        self.room.values[self.rank] = value
        self.room.barrier.wait(SECONDS)
        found = list(self.room.values)
        self.room.barrier.wait(SECONDS)
        return found

    def broadcast(self, value: T) -> T:
        return self.gather(value)[0]


def both(body: Callable[[Ranks], object]) -> list[object]:
    """What each rank's `body` returns, or raises."""
    room = Room()

    def run(rank: int) -> object:
        ranks = ThreadRank(rank=rank, world=2, device=torch.device("cpu"), room=room)
        try:
            return body(ranks)
        except Exception as err:
            return err

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def raising(err: Exception) -> Callable[[], None]:
    def body() -> None:
        raise err

    return body


def test_a_value_of_the_first_rank_is_everybodys() -> None:
    assert both(lambda ranks: on_first(ranks, lambda: ranks.rank + 7)) == [7, 7]
    assert both(lambda ranks: on_all(ranks, lambda: ranks.rank)) == [0, 1]


@pytest.mark.parametrize(
    ("err", "there"),
    [
        (OSError(errno.ENOSPC, "No space left"), OSError),
        (UserError("the model isn't there"), UserError),
        (KeyError("name"), KeyError),
        (ShardDamaged("shard 7 is damaged", shard=7), RanksError),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(err: Exception, there: type[Exception]) -> None:
    first = both(lambda ranks: on_first(ranks, raising(err)))
    assert first[0] is err
    assert isinstance(first[1], there)
    assert str(err.args[-1]) in str(first[1])
    second = both(lambda ranks: on_all(ranks, raising(err) if ranks.rank else lambda: None))
    assert isinstance(second[0], there)
    assert second[1] is err
    for found in (first[1], second[0]):
        assert getattr(found, "errno", None) == getattr(err, "errno", None)


def test_a_full_disk_is_known_through_what_it_led_to() -> None:
    full = OSError(errno.EDQUOT, "Disk quota exceeded")
    try:
        try:
            raise full
        except OSError:
            raise RuntimeError("unexpected position in the archive")  # noqa: B904
    except RuntimeError as err:
        assert full_disk(err) is full
        wrapped = DiskError.of(err, "checkpoint of step 5")
    assert full_disk(wrapped) is wrapped
    assert "step 5: unexpected position" in str(wrapped)
    assert full_disk(OSError(errno.EACCES, "Permission denied")) is None
    assert full_disk(None) is None


@dataclass
class Disk:
    """Full for the first writes of each rank; time goes on as somebody sleeps."""

    full: int
    now: float = 0.0
    said: list[str] = field(default_factory=list)
    stops_at: float = float("inf")
    written: list[int] = field(default_factory=list)
    tries: dict[int, int] = field(default_factory=dict)

    def wait(self, *, limit: float = 100.0) -> SpaceWait:
        return SpaceWait(
            limit_seconds=limit,
            stopping=lambda: self.now >= self.stops_at,
            report=self.said.append,
            now=lambda: self.now,
            sleep=self.sleep,
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def write(self, rank: int = 0) -> str:
        self.tries[rank] = self.tries.get(rank, 0) + 1
        if self.tries[rank] <= self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written.append(rank)
        return "done"


def test_a_full_disk_is_waited_for_and_told() -> None:
    disk = Disk(full=3)
    assert disk.wait().write("checkpoint of step 5", disk.write) == "done"
    assert len(disk.said) == 4
    assert "the disk is full; checkpoint of step 5 waits" in disk.said[0]
    assert "for at most 100 s" in disk.said[0]
    assert "is written after 15 s without space" in disk.said[-1]


@pytest.mark.parametrize("why", ["too long", "a stop"])
def test_the_wait_for_space_ends(why: str) -> None:
    disk = Disk(full=1000, stops_at=7.0 if why == "a stop" else float("inf"))
    with pytest.raises(OSError, match="No space left"):
        disk.wait(limit=20.0).write("policy version 3", disk.write)
    assert disk.now == pytest.approx(7.0 if why == "a stop" else 20.0, abs=0.5)
    assert disk.written == []


def test_other_errors_are_not_waited_for() -> None:
    disk = Disk(full=0)
    with pytest.raises(PermissionError):
        disk.wait().write("a line", raising(PermissionError(errno.EACCES, "no")))
    assert disk.now == 0.0


@pytest.mark.parametrize("limit", [100.0, 12.0])
def test_all_ranks_try_again_or_none_does(limit: float) -> None:
    """The clock is the first rank's alone: the other one only hears what was decided."""
    disk = Disk(full=4)
    found = both(
        lambda ranks: disk.wait(limit=limit).write(
            "checkpoint", lambda: disk.write(ranks.rank), ranks=ranks
        )
    )
    if limit == 100.0:
        assert found == ["done", "done"]
        assert disk.tries == {0: 5, 1: 5}
    else:
        assert all(isinstance(err, OSError) for err in found)
        assert disk.tries == {0: 4, 1: 4}
