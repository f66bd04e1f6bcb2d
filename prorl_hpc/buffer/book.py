"""The groups of a run and their durable facts: opening, closing, loss, restart. Pure.

Facts that must survive a restart leave as manifest lines through `drain_lines` and come back
through `recorded` once durable; `restore` rebuilds everything but leases, which are soft state.
"""

from collections import Counter
from collections.abc import Sequence

from prorl_hpc.buffer.capacity import Capacity
from prorl_hpc.buffer.config import BufferConfig
from prorl_hpc.buffer.groups import OpenGroup
from prorl_hpc.buffer.handout import Handout
from prorl_hpc.buffer.leases import LeaseBook
from prorl_hpc.buffer.manifest import (
    Closed,
    Dropped,
    Line,
    Merged,
    Moves,
    Quarantined,
    Shard,
    Validation,
    live_shards,
)
from prorl_hpc.buffer.messages import VALIDATION_BASE
from prorl_hpc.buffer.opening import Opening
from prorl_hpc.records import Kind

SUPERSEDED = "superseded:"
"""Begins the reason of a validation group that was given up for a newer validation."""

CLAIM_SECONDS = 5.0
"""So long after a restart, at most, nodes at work may claim what they hold."""


class GroupBook:
    """All groups by state. Who makes them, and who gets them, is decided by the dispatcher."""

    def __init__(self, config: BufferConfig, *, first_lease_id: int = 1) -> None:
        self.config = config
        self.counters: Counter[str] = Counter()
        self.capacity = Capacity(
            batch_groups=config.batch_groups, max_staleness=config.max_staleness
        )
        self.leases = LeaseBook(lease_seconds=config.lease_seconds, first_id=first_lease_id)
        self.opening = Opening(config, capacity=self.capacity)
        self.failures: Counter[str] = Counter()
        self.handout = Handout(deterministic=config.deterministic)
        self.open: dict[int, OpenGroup] = {}
        self.closed: dict[int, Closed] = {}
        self.dropped: set[int] = set()
        self.superseded: set[int] = set()
        """Those of the dropped ones that nothing was wrong with."""
        self._next_group = 0
        self._needy: set[int] = set()
        self._closing: dict[int, Closed | Dropped] = {}
        self._lines: list[Line] = []
        self._moves = Moves()
        self._hold_until = float("-inf")

    def drain_lines(self) -> list[Line]:
        """Manifest lines to write, in this order."""
        lines, self._lines = self._lines, []
        return lines

    def recorded(self, line: Line) -> None:
        """A drained line is durable."""
        if isinstance(line, Closed | Dropped) and self._closing.get(line.group) == line:
            del self._closing[line.group]
            self._settle(line)
        elif isinstance(line, Merged):
            self._relocate(line)

    def quarantine(self, shard: int, *, reason: str, group_id: int | None) -> None:
        """A shard is lost. Remakes what it held of groups that nobody has taken, and of `group_id`.

        `group_id` is the group over which the learner noticed; it is not trained yet.
        """
        if group_id is not None:
            self.handout.held.discard(group_id)
        self._lines.append(Quarantined(number=shard, reason=reason))
        closing = [self._moves.of(x) for x in self._closing.values() if isinstance(x, Closed)]
        touched = [x for x in [*self.closed.values(), *closing] if x.touches(shard)]
        for line in touched:
            if line.group not in self.handout.consumed and line.group not in self.handout.held:
                self._reopen(line)
        for group in self.open.values():
            lost = group.lose_shard(shard)
            self.counters["lost"] += lost
            if lost:
                self._needy.add(group.group_id)
        if group_id in self.closed:
            self.handout.add(self.closed[group_id])

    def moved(self, shard: int) -> bool:
        """Whether the shard was merged into another one, sound as it was then."""
        return shard in self._moves

    def again(self, group_id: int) -> None:
        """The learner couldn't read the group where it was; it gets the group's present place."""
        self.handout.held.discard(group_id)
        if group_id in self.closed:
            self.handout.add(self.closed[group_id])

    def restore(self, lines: Sequence[Line], *, now: float) -> None:
        """Rebuilds the state from the manifest's valid lines. Call once, before anything else.

        Nothing is leased for a moment, so that nodes at work can claim what they hold.
        """
        lost = {line.number for line in lines if isinstance(line, Quarantined)}
        self._moves = Moves(lines)
        self.opening.restore(lines)
        self.capacity.restore(lines)
        for line in lines:
            if isinstance(line, Validation):
                self._open_validation(line)
        settled = {line.group: line for line in lines if isinstance(line, Closed | Dropped)}
        for line in settled.values():
            here = self._moves.of(line) if isinstance(line, Closed) else line
            if isinstance(here, Dropped) or not any(here.touches(shard) for shard in lost):
                self._settle(here)
        for shard in live_shards(lines).values():
            self._restore_shard(shard)
        for group in [g for g in self.open.values() if g.complete]:
            self._close(group, reason="complete")
        if self.capacity.limit:
            self._hold_until = now + min(CLAIM_SECONDS, self.config.lease_seconds / 6)

    # --- for the dispatcher

    def _restore_shard(self, shard: Shard) -> None:
        for row, (group_id, rollout, usable) in enumerate(shard.rows):
            self.counters["trajectories"] += 1
            group = self.open.get(group_id) or self._open_late(group_id)
            if group is not None and rollout < group.num_rollouts:
                group.store(rollout, location=(shard.number, row), usable=usable)

    def _end_lease(self, lease_id: int, *, now: float, avoid: bool = True) -> None:
        held = self.leases.end(lease_id)
        group = self.open.get(held.group_id) if held is not None else None
        if held is not None and group is not None:
            until = now + self.config.lease_seconds if avoid else now
            group.lose(held.rollouts, lease_id=lease_id, worker=held.worker, until=until)
            if group.has_missing:
                self._needy.add(group.group_id)

    def _close(self, group: OpenGroup, *, reason: str) -> None:
        """Takes the group out of work; it is closed (or dropped) once the record is durable."""
        line: Closed | Dropped = group.closed(reason=reason)
        if group.num_usable < group.min_usable:
            why = f"{group.num_usable} of {group.num_rollouts} usable when {reason}"
            line = Dropped(group=group.group_id, kind=group.kind, reason=why)
        self._forget(group.group_id)
        self._closing[group.group_id] = line
        self._lines.append(line)

    def _settle(self, line: Closed | Dropped) -> None:
        self._forget(line.group)
        if isinstance(line, Closed):
            self.counters[f"closed_{line.reason}"] += 1
            self.closed[line.group] = self._moves.of(line)
            self.opening.note(line)
            self.handout.add(line)
            return
        self.counters["dropped"] += 1
        self.dropped.add(line.group)
        if line.reason.startswith(SUPERSEDED):
            self.superseded.add(line.group)
        if line.kind is Kind.train:
            self.capacity.num_dropped += 1
            self._grow()

    def _relocate(self, line: Merged) -> None:
        """The rows of some shards lie in another one now."""
        self._moves.add(line)
        for group_id in {row[0] for row in line.rows}:
            if group_id in self.closed:
                self.closed[group_id] = self._moves.of(self.closed[group_id])
            elif group_id in self.open:
                self.open[group_id].relocate(self._moves)

    def _reopen(self, line: Closed) -> None:
        """A closed group is open again, with all that it has."""
        self.closed.pop(line.group, None)
        self._closing.pop(line.group, None)
        self.handout.withdraw(line.group)
        group = self._make(line.group)
        if group is not None:
            group.instance_id = line.instance_id
            for rollout, number, row, usable in line.rollouts:
                group.store(rollout, location=(number, row), usable=usable)

    def _take_up(self, group: OpenGroup) -> None:
        """A validation group that was given up is asked for after all."""
        self.superseded.discard(group.group_id)
        self.dropped.discard(group.group_id)
        self._enter(group)

    def _forget(self, group_id: int) -> None:
        group = self.open.pop(group_id, None)
        self._needy.discard(group_id)
        for lease_id in group.lease_ids if group is not None else ():
            self.leases.end(lease_id)

    def _grow(self) -> None:
        if self.handout.announced:
            line = self.capacity.grow(version=self.handout.version, filtered=self.handout.filtered)
            if line is not None:
                self._lines.append(line)

    def _known(self, group_id: int) -> bool:
        return (
            group_id in self.open
            or group_id in self.closed
            or group_id in self.dropped
            or group_id in self._closing
            or group_id in self.handout.consumed
        )

    def _open_late(self, group_id: int) -> OpenGroup | None:
        """A training group that this attempt has not leased yet, but an earlier one has."""
        if 0 <= group_id < self.capacity.limit and not self._known(group_id):
            return self._open(group_id)
        return None

    def _make(self, group_id: int) -> OpenGroup | None:
        if group_id < VALIDATION_BASE:
            return self._open(group_id)
        group = self.opening.validated(group_id)
        return None if group is None else self._enter(group)

    def _open(self, group_id: int) -> OpenGroup:
        group, line = self.opening.train(group_id)
        if line is not None:
            self._lines.append(line)
        return self._enter(group)

    def _enter(self, group: OpenGroup) -> OpenGroup:
        self.open[group.group_id] = group
        self._needy.add(group.group_id)
        return group

    def _open_validation(self, line: Validation) -> None:
        wanted = self.opening.add_validation(line)
        for group_id in wanted.group_ids:
            if not self._known(group_id):
                self._enter(wanted.open_group(group_id))
