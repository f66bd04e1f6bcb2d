"""Which instances are worth another visit: pools by the newest known solve rate. Pure.

Groups whose rollouts were all solved, or none of them, give no gradient. An instance of which the
last group ended like that is passed over with a probability, in favour of another of its task.
The choice is a function of seed, group and the results of earlier policy versions alone.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

SOLVED = 1.0 - 1e-6
"""A reward from here on counts as solved."""
SKIP_PROBABILITY = 0.75
TRIES = 8
"""So many instances are looked at; the last one is taken as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An instance, and what a bandit must remember of having chosen it."""

    index: int
    context: str = ""
    probability: float = 0.0


class Curriculum(Protocol):
    """Learns how groups went, and chooses the instances of new ones."""

    def chosen(self, group_id: int, choice: Choice) -> None: ...

    def note(
        self, group_id: int, *, task: str, index: int, num_solved: int, known: int
    ) -> None: ...

    def choose(self, group_id: int, *, task: str, index: int, size: int, floor: int) -> Choice: ...

    def num_extreme(self) -> int: ...


class SolveRates:
    """Results by instance, and the choice that follows from them."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed
        self._results: dict[tuple[str, int], list[tuple[int, bool]]] = {}

    def chosen(self, group_id: int, choice: Choice) -> None:
        """An earlier attempt has made this choice; only results are of interest here."""

    def note(self, group_id: int, *, task: str, index: int, num_solved: int, known: int) -> None:
        """A group of the instance is closed, with `known` rewards of which `num_solved` count."""
        if known >= 2:
            extreme = num_solved in (0, known)
            results = self._results.setdefault((task, index), [])
            if (group_id, extreme) not in results:
                insort(results, (group_id, extreme))

    def choose(self, group_id: int, *, task: str, index: int, size: int, floor: int) -> Choice:
        """The instance of a new group that the mixture gave `index` of `size`.

        Results of groups from `floor` on aren't looked at.
        """
        for turn in range(TRIES):
            if not self._extreme(task, index, floor=floor):
                break
            if self._draw(group_id, turn, "skip") >= SKIP_PROBABILITY:
                break
            index = int(self._draw(group_id, turn, "other") * size)
        return Choice(index=index)

    def num_extreme(self) -> int:
        """Instances always or never solved in their newest group."""
        return sum(results[-1][1] for results in self._results.values())

    def _extreme(self, task: str, index: int, *, floor: int) -> bool:
        results = self._results.get((task, index), [])
        place = bisect_left(results, (floor, False))
        return place > 0 and results[place - 1][1]

    def _draw(self, group_id: int, turn: int, what: str) -> float:
        return draw(self._seed, "curriculum", group_id, turn, what)


def draw(seed: int, name: str, group_id: int, turn: int, what: str) -> float:
    """Uniform in [0, 1); the same for the same arguments."""
    key = f"{seed}/{name}/{group_id}/{turn}/{what}"
    digest = blake2b(key.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53
