"""Who makes which rollout, and when a group is closed. Pure: the clock is passed in; no I/O.

    leased ──► admitted (writing) ──► stored ──► closing (record on its way) ──► closed ──► taken

Facts that must survive a restart leave as manifest lines through `drain_lines` and come back
through `recorded` once durable; `restore` rebuilds everything but leases, which are soft state.
"""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from prorl_hpc.buffer.capacity import Capacity
from prorl_hpc.buffer.config import BufferConfig
from prorl_hpc.buffer.groups import Location, OpenGroup, SlotState, reference
from prorl_hpc.buffer.handout import Handout
from prorl_hpc.buffer.leases import LeaseBook
from prorl_hpc.buffer.manifest import Closed, Dropped, Line, Quarantined, Shard, Validation
from prorl_hpc.buffer.messages import VALIDATION_BASE, Claim, GroupIds, GroupRef
from prorl_hpc.buffer.mixture import Mixture, group_seed
from prorl_hpc.buffer.validation import IDS_PER_VERSION, ValidationSet
from prorl_hpc.records import Kind, Lease, Trajectory

GRACE_SECONDS = 5.0
"""A younger lease isn't missed in a heartbeat: its reply may still be on its way."""
CLAIM_SECONDS = 5.0


class Admission(StrEnum):
    """What is to be done with a pushed trajectory."""

    accept = "accept"
    """Write it, then call `stored`."""
    writing = "writing"
    """An equal one is being written: answer when that is durable."""
    duplicate = "duplicate"
    late = "late"
    retry = "retry"


class Dispatcher:
    """The state of all groups of a run."""

    def __init__(self, config: BufferConfig, *, first_lease_id: int = 1) -> None:
        self.config = config
        self.counters: Counter[str] = Counter()
        self.capacity = Capacity(
            batch_groups=config.batch_groups, max_staleness=config.max_staleness
        )
        self.leases = LeaseBook(lease_seconds=config.lease_seconds, first_id=first_lease_id)
        self.handout = Handout(deterministic=config.deterministic)
        self.open: dict[int, OpenGroup] = {}
        self.closed: dict[int, Closed] = {}
        self.dropped: set[int] = set()
        self._mixture = Mixture(config.tasks, seed=config.seed)
        self._next_group = 0
        self._needy: set[int] = set()
        self._closing: dict[int, Closed | Dropped] = {}
        self._validations: dict[int, ValidationSet] = {}
        self._lines: list[Line] = []
        self._hold_until = float("-inf")

    # --- rollout nodes

    def lease(self, worker: str, *, capacity: int, now: float) -> list[Lease]:
        """Leases of up to `capacity` rollouts: validation first, then the oldest group.

        A group is only split over nodes when a node has no room for all that it lacks.
        """
        self.leases.heard(worker, now=now)
        alone = self.leases.num_workers(now=now) < 2
        given: list[Lease] = []
        tried: set[int] = set()
        while capacity > 0 and now >= self._hold_until:
            group = self._candidate(worker, tried=tried, now=now, alone=alone)
            if group is None:
                break
            tried.add(group.group_id)
            rollouts = group.missing(worker=worker, now=now, alone=alone)
            if given and len(rollouts) > capacity:
                break
            lease = self._lease(group, rollouts[:capacity], worker=worker, now=now)
            capacity -= len(lease.rollouts)
            given.append(lease)
        return given

    def heartbeat(self, worker: str, claims: Sequence[Claim], *, now: float) -> list[int]:
        """Renews these leases and gives back the worker's others; returns those it has lost.

        A lease that expired, or was granted by an earlier attempt of the buffer, is revived with
        what nobody else was given meanwhile.
        """
        self.leases.heard(worker, now=now)
        lost = []
        for claim in claims:
            if not self.leases.renew(worker, claim.lease_id, now=now) and not self._revive(
                worker, claim, now=now
            ):
                lost.append(claim.lease_id)
        claimed = {claim.lease_id for claim in claims}
        for held in self.leases.of(worker):
            young = now - held.issued < min(GRACE_SECONDS, self.config.lease_seconds / 2)
            if held.lease_id not in claimed and not young:
                self._end_lease(held.lease_id, now=now)
        return lost

    def worker_replaced(self, worker: str, *, now: float) -> None:
        """A new attempt of the worker: what the old one had is leased again at once."""
        for held in self.leases.of(worker):
            self._end_lease(held.lease_id, now=now, avoid=False)

    def admit(self, t: Trajectory, *, now: float) -> Admission:
        """Decides on a pushed trajectory; with `accept`, its slot waits for `stored`."""
        group = self.open.get(t.group_id) or self._open_late(t.group_id)
        if group is None or not 0 <= t.rollout_index < group.num_rollouts:
            return self._too_late(t)
        slot = group.slots[t.rollout_index]
        if slot.state is SlotState.stored:
            self.counters["duplicate"] += 1
            return Admission.duplicate
        if slot.state is SlotState.writing:
            return Admission.writing
        if not group.fits(t):
            self.counters["misfit"] += 1
            return Admission.late
        if slot.lease_id is not None:
            self.leases.done(slot.lease_id, t.rollout_index)
            slot.lease_id = None
        if not t.outcome.usable and self._retry(group, t, now=now):
            return Admission.retry
        slot.state = SlotState.writing
        group.instance_id = t.instance_id
        if group.deadline is None:
            group.deadline = now + self.config.group_deadline_seconds
        return Admission.accept

    def stored(self, group_id: int, rollout: int, *, location: Location, usable: bool) -> None:
        """The accepted trajectory is durable."""
        self.counters["trajectories"] += 1
        group = self.open.get(group_id)
        if group is None:  # consumed by an announcement meanwhile
            return
        group.store(rollout, location=location, usable=usable)
        if group.complete:
            self._close(group, reason="complete")

    def tick(self, now: float) -> None:
        """Ends leases and groups whose time is up."""
        for lease_id in self.leases.expired(now=now):
            self.counters["lease_expired"] += 1
            self._end_lease(lease_id, now=now)
        for group in list(self.open.values()):
            if group.deadline is not None and now >= group.deadline and not group.writing:
                self._overdue(group, now=now)

    # --- learner

    def announce(
        self, *, version: int, step: int, filtered: int, consumed: GroupIds, held: GroupIds
    ) -> None:
        """The learner says where it stands; what it has not consumed is handed out again."""
        for group_id in [g for g in self.open if g in consumed]:
            self._forget(group_id)
        self._next_group = 0  # known groups are skipped
        self.handout.announce(
            version=version,
            step=step,
            filtered=filtered,
            consumed=consumed,
            held=held,
            closed=self.closed.values(),
        )
        self._grow()

    def advance(
        self, *, version: int | None = None, step: int | None = None, filtered: int | None = None
    ) -> None:
        """New totals of the learner; capacity grows with them."""
        self.handout.advance(version=version, step=step, filtered=filtered)
        self._grow()

    def take(self, num_groups: int) -> list[GroupRef]:
        """Closed training groups for the learner, oldest first, each once."""
        chosen = self.handout.take(num_groups, dropped=self.dropped)
        return [reference(self.closed[g]) for g in chosen]

    def give_back(self, refs: Sequence[GroupRef]) -> None:
        """Takes back groups that were taken and not sent."""
        for ref in refs:
            self.handout.held.discard(ref.group_id)
            self.handout.add(self.closed[ref.group_id])

    def validate(self, *, version: int, counts: dict[str, int], num_rollouts: int) -> None:
        """Opens the groups of a validation; again for the same version: nothing changes."""
        if version not in self._validations:
            line = Validation(version=version, counts=counts, num_rollouts=num_rollouts)
            self._open_validation(line)
            self._lines.append(line)

    def validation_results(self, version: int) -> tuple[list[GroupRef] | None, int]:
        """(groups when all are closed or dropped, number dropped); None: not yet, or unknown."""
        wanted = self._validations.get(version)
        if wanted is None:
            return None, 0
        ids = wanted.group_ids
        if any(g not in self.closed and g not in self.dropped for g in ids):
            return None, 0
        refs = [reference(self.closed[g]) for g in ids if g in self.closed]
        return refs, len(ids) - len(refs)

    # --- durable facts

    def drain_lines(self) -> list[Line]:
        """Manifest lines to write, in this order."""
        lines, self._lines = self._lines, []
        return lines

    def recorded(self, line: Line) -> None:
        """A drained line is durable."""
        if isinstance(line, Closed | Dropped) and self._closing.get(line.group) == line:
            del self._closing[line.group]
            self._settle(line)

    def quarantine(self, shard: int, *, reason: str, group_id: int | None) -> None:
        """A shard is lost. Remakes what it held of groups that nobody has taken, and of `group_id`.

        `group_id` is the group over which the learner noticed; it is not trained yet.
        """
        if group_id is not None:
            self.handout.held.discard(group_id)
        self._lines.append(Quarantined(number=shard, reason=reason))
        touched = [
            line
            for line in [*self.closed.values(), *self._closing.values()]
            if isinstance(line, Closed) and line.touches(shard)
        ]
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

    def restore(self, lines: Sequence[Line], *, now: float) -> None:
        """Rebuilds the state from the manifest's valid lines. Call once, before anything else.

        Nothing is leased for a moment, so that nodes at work can claim what they hold.
        """
        lost = {line.number for line in lines if isinstance(line, Quarantined)}
        self.capacity.restore(lines)
        for line in lines:
            if isinstance(line, Validation):
                self._open_validation(line)
        settled = {line.group: line for line in lines if isinstance(line, Closed | Dropped)}
        for line in settled.values():
            if isinstance(line, Dropped) or not any(line.touches(shard) for shard in lost):
                self._settle(line)
        for shard in (line for line in lines if isinstance(line, Shard)):
            if shard.number not in lost:
                self._restore_shard(shard)
        for group in [g for g in self.open.values() if g.complete]:
            self._close(group, reason="complete")
        if self.capacity.limit:
            self._hold_until = now + min(CLAIM_SECONDS, self.config.lease_seconds / 6)

    # --- inside

    def _revive(self, worker: str, claim: Claim, *, now: float) -> bool:
        group = self.open.get(claim.group_id) or self._open_late(claim.group_id)
        free = [
            r
            for r in claim.rollouts
            if group is not None
            and 0 <= r < group.num_rollouts
            and group.slots[r].state is SlotState.missing
        ]
        if group is None or not free:
            return False
        self._grant(group, free, worker=worker, now=now, lease_id=claim.lease_id)
        return True

    def _grant(
        self,
        group: OpenGroup,
        rollouts: list[int],
        *,
        worker: str,
        now: float,
        lease_id: int | None = None,
    ) -> int:
        if group.deadline is None:
            group.deadline = now + self.config.group_deadline_seconds
        held = self.leases.grant(worker, group.group_id, rollouts, now=now, lease_id=lease_id)
        group.grant(rollouts, lease_id=held.lease_id)
        if not group.has_missing:
            self._needy.discard(group.group_id)
        return held.lease_id

    def _restore_shard(self, shard: Shard) -> None:
        for row, (group_id, rollout, usable) in enumerate(shard.rows):
            self.counters["trajectories"] += 1
            group = self.open.get(group_id) or self._open_late(group_id)
            if group is not None and rollout < group.num_rollouts:
                group.store(rollout, location=(shard.number, row), usable=usable)

    def _candidate(
        self, worker: str, *, tried: set[int], now: float, alone: bool
    ) -> OpenGroup | None:
        for group_id in sorted(self._needy - tried, key=lambda g: (g < VALIDATION_BASE, g)):
            group = self.open[group_id]
            if not group.has_missing:
                self._needy.discard(group_id)
            elif self._timely(group) and group.missing(worker=worker, now=now, alone=alone):
                return group
        while self._next_group < self.capacity.reach:
            group_id, self._next_group = self._next_group, self._next_group + 1
            if not self._known(group_id):
                return self._open(group_id)
        return None

    def _timely(self, group: OpenGroup) -> bool:
        """False for work of a history that the learner has rolled back: its policy is gone."""
        if group.kind is Kind.train:
            return group.group_id < self.capacity.reach
        version = self.handout.version if self.handout.announced else None
        return version is None or (group.policy_version or 0) <= version

    def _lease(self, group: OpenGroup, rollouts: list[int], *, worker: str, now: float) -> Lease:
        lease_id = self._grant(group, rollouts, worker=worker, now=now)
        assert group.deadline is not None
        return Lease(
            lease_id=lease_id,
            group_id=group.group_id,
            kind=group.kind,
            task=group.task,
            instance_index=group.instance_index,
            rollouts=tuple(rollouts),
            num_rollouts=group.num_rollouts,
            seed=group_seed(self.config.seed, group.group_id),
            policy_version=group.policy_version,
            deadline_seconds=max(group.deadline - now, 0.0),
            context_tokens=group.context_tokens,
        )

    def _end_lease(self, lease_id: int, *, now: float, avoid: bool = True) -> None:
        held = self.leases.end(lease_id)
        group = self.open.get(held.group_id) if held is not None else None
        if held is not None and group is not None:
            until = now + self.config.lease_seconds if avoid else now
            group.lose(held.rollouts, lease_id=lease_id, worker=held.worker, until=until)
            if group.has_missing:
                self._needy.add(group.group_id)

    def _retry(self, group: OpenGroup, t: Trajectory, *, now: float) -> bool:
        """Notes an infrastructure failure; whether the rollout is to be tried again."""
        self.counters[f"failure/{t.task}"] += 1
        slot = group.slots[t.rollout_index]
        slot.num_failures += 1
        if slot.num_failures > self.config.max_infrastructure_retries:
            self.counters["masked"] += 1
            return False
        slot.state = SlotState.missing
        slot.avoid, slot.avoid_until = t.worker, now + self.config.lease_seconds
        self._needy.add(group.group_id)
        return True

    def _overdue(self, group: OpenGroup, *, now: float) -> None:
        if group.num_usable >= group.min_usable or group.retried:
            self._close(group, reason="deadline")
            return
        group.retried = True
        group.deadline = now + self.config.group_deadline_seconds
        self.counters["group_retried"] += 1
        for lease_id in group.lease_ids:
            self._end_lease(lease_id, now=now)

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
            self.closed[line.group] = line
            self.handout.add(line)
            return
        self.counters["dropped"] += 1
        self.dropped.add(line.group)
        if line.kind is Kind.train:
            self.capacity.num_dropped += 1
            self._grow()

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
        wanted = self._validations.get((group_id - VALIDATION_BASE) // IDS_PER_VERSION)
        if wanted is not None:
            self._enter(wanted.open_group(group_id))
        return self.open.get(group_id)

    def _open(self, group_id: int) -> OpenGroup:
        version = self.capacity.version_of(group_id)
        task, index = self._mixture.pick(group_id)
        stage = self.config.stage(version)
        number = self.config.rollouts_of(task, stage=stage)
        return self._enter(
            OpenGroup(
                group_id=group_id,
                kind=Kind.train,
                task=task,
                instance_index=index,
                num_rollouts=number,
                min_usable=min(self.config.min_usable, number),
                policy_version=version if self.config.deterministic else None,
                context_tokens=stage.context_tokens if stage is not None else None,
            )
        )

    def _enter(self, group: OpenGroup) -> OpenGroup:
        self.open[group.group_id] = group
        self._needy.add(group.group_id)
        return group

    def _open_validation(self, line: Validation) -> None:
        wanted = self._validations[line.version] = ValidationSet(line)
        for group_id in wanted.group_ids:
            if not self._known(group_id):
                self._enter(wanted.open_group(group_id))

    def _too_late(self, t: Trajectory) -> Admission:
        line = self.closed.get(t.group_id) or self._closing.get(t.group_id)
        if isinstance(line, Closed) and any(r[0] == t.rollout_index for r in line.rollouts):
            self.counters["duplicate"] += 1
            return Admission.duplicate
        self.counters["late"] += 1
        return Admission.late
