"""Which task and instance each training group is about: a pure function of (seed, group id).

Tasks are interleaved so that every stretch of groups holds their weights as exactly as whole
numbers allow; within a task, instances come in epochs, each in its own shuffled order.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

ROUNDS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskShare:
    """A task's part in the mixture."""

    weight: float
    train_size: int
    """Number of training instances."""
    num_rollouts: int | None = None
    """Rollouts per group; None: the stage's or the algorithm's."""


class Mixture:
    """Task and instance index by group id. Remembers what it has computed."""

    def __init__(self, tasks: Mapping[str, TaskShare], *, seed: int) -> None:
        self._seed = seed
        self._shares = {name: share for name, share in sorted(tasks.items()) if share.weight > 0}
        if not self._shares:
            raise ValueError("no task has a positive weight; give one")
        for name, share in self._shares.items():
            if share.train_size < 1:
                raise ValueError(f"train_size={share.train_size} of task {name!r}; want at least 1")
        self._names = list(self._shares)
        total = sum(share.weight for share in self._shares.values())
        self._weights = [share.weight / total for share in self._shares.values()]
        self._phases = [
            _number(f"{seed}/phase/{name}") / 2.0**64 * weight
            for name, weight in zip(self._names, self._weights, strict=True)
        ]
        self._counts = [0] * len(self._names)
        self._tasks = array("H")
        self._positions = array("q")

    def pick(self, group_id: int) -> tuple[str, int]:
        """(task, instance index) of a training group."""
        while len(self._tasks) <= group_id:
            self._extend()
        task = self._tasks[group_id]
        name = self._names[task]
        size = self._shares[name].train_size
        epoch, place = divmod(self._positions[group_id], size)
        return name, permuted(place, size=size, key=f"{self._seed}/{name}/{epoch}")

    def _extend(self) -> None:
        turn = len(self._tasks) + 1
        owed = [
            weight * turn + phase - count
            for weight, phase, count in zip(self._weights, self._phases, self._counts, strict=True)
        ]
        task = owed.index(max(owed))
        self._tasks.append(task)
        self._positions.append(self._counts[task])
        self._counts[task] += 1


def group_seed(seed: int, group_id: int) -> int:
    """Seed of one group, 63 bits."""
    return _number(f"{seed}/group/{group_id}") >> 1


def permuted(index: int, *, size: int, key: str) -> int:
    """Place of `index` in a permutation of range(size) chosen by `key`.

    A Feistel network over the next power of four, walked until it lands inside.
    """
    half = max((max(size - 1, 1).bit_length() + 1) // 2, 1)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (_number(f"{key}/{turn}/{right}") & mask)
        index = (left << half) | right
        if index < size:
            return index


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
