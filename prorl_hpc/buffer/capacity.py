"""How many training groups may ever have been leased, and which policy version each belongs to.

At most `(max_staleness + version + 1) * batch_groups` groups, and one more for each that gave no
sample (filtered by the learner, or dropped by the buffer). Pure.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from prorl_hpc.buffer.manifest import Limit, Line


class Capacity:
    """A limit that only grows, with the versions at which it grew; and how far one may go now."""

    def __init__(self, *, batch_groups: int, max_staleness: int) -> None:
        self._batch_groups = batch_groups
        self._max_staleness = max_staleness
        self._limits: list[int] = []
        self._versions: list[int] = []
        self._reach: int | None = None
        self.num_dropped = 0

    @property
    def limit(self) -> int:
        """Training groups with ids below may have been leased, by whichever attempt."""
        return self._limits[-1] if self._limits else 0

    @property
    def reach(self) -> int:
        """Groups with ids below may be leased now: less than `limit` after a roll-back."""
        return self.limit if self._reach is None else min(self._reach, self.limit)

    @property
    def newest_version(self) -> int:
        """Version of the last growth."""
        return self._versions[-1] if self._versions else 0

    def version_of(self, group_id: int) -> int:
        """Version at which the group came within the limit."""
        place = bisect_right(self._limits, group_id)
        return self._versions[place] if place < len(self._versions) else self.newest_version

    def first_of(self, version: int) -> int:
        """First group of that version: all below belong to earlier ones."""
        place = bisect_left(self._versions, version)
        return self._limits[place - 1] if place > 0 else 0

    def grow(self, *, version: int, filtered: int) -> Limit | None:
        """Raises the limit to what these totals allow; the line to record, or None."""
        batches = self._max_staleness + version + 1
        limit = batches * self._batch_groups + filtered + self.num_dropped
        self._reach = limit
        if limit <= self.limit:
            return None
        self._limits.append(limit)
        self._versions.append(version)
        return Limit(limit=limit, version=version)

    def restore(self, lines: Iterable[Line]) -> None:
        """Takes over the limits of earlier attempts."""
        for line in lines:
            if isinstance(line, Limit) and line.limit > self.limit:
                self._limits.append(line.limit)
                self._versions.append(line.version)
