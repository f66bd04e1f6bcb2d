"""Which closed training groups the learner gets next, each once per surviving history. Pure."""

from collections.abc import Iterable

from prorl_hpc.buffer.manifest import Closed
from prorl_hpc.buffer.messages import GroupIds
from prorl_hpc.records import Kind


class Handout:
    """Where the learner stands and what waits for it."""

    def __init__(self, *, deterministic: bool) -> None:
        self._deterministic = deterministic
        self._ready: set[int] = set()
        self._cursor = 0
        self.announced = False
        self.version = 0
        self.step = 0
        self.filtered = 0
        self.consumed = GroupIds()
        self.held: set[int] = set()

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def announce(
        self,
        *,
        version: int,
        step: int,
        filtered: int,
        consumed: GroupIds,
        held: GroupIds,
        closed: Iterable[Closed],
    ) -> None:
        """The learner starts here; all closed groups that it doesn't name wait for it."""
        self.version, self.step, self.filtered = version, step, filtered
        self.consumed, self.held = consumed, set(held)
        self.announced = True
        self._cursor = 0
        self._ready = set()
        for line in closed:
            self.add(line)

    def advance(self, *, version: int | None, step: int | None, filtered: int | None) -> None:
        """New totals."""
        self.version = self.version if version is None else max(version, self.version)
        self.step = self.step if step is None else step
        self.filtered = self.filtered if filtered is None else filtered

    def add(self, line: Closed) -> None:
        """A group is closed, durably."""
        if (
            line.kind is Kind.train
            and line.group not in self.held
            and line.group not in self.consumed
        ):
            self._ready.add(line.group)
            self._cursor = min(self._cursor, line.group)

    def withdraw(self, group_id: int) -> None:
        """The group isn't closed any more."""
        self._ready.discard(group_id)
        self._cursor = min(self._cursor, group_id)

    def take(self, num_groups: int, *, dropped: set[int]) -> list[int]:
        """Group ids, oldest first; in deterministic mode without leaving one out."""
        if not self.announced:
            return []
        chosen = (
            self._in_order(num_groups, dropped=dropped)
            if self._deterministic
            else sorted(self._ready)[:num_groups]
        )
        self._ready.difference_update(chosen)
        self.held.update(chosen)
        return chosen

    def _in_order(self, num_groups: int, *, dropped: set[int]) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < num_groups:
            group_id = self._cursor
            if group_id in self._ready:
                chosen.append(group_id)
            elif not (group_id in dropped or group_id in self.consumed or group_id in self.held):
                break
            self._cursor += 1
        return chosen
