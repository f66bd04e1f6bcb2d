"""Who makes which rollout, and when a group is closed. Pure: the clock is passed in; no I/O.

    leased ──► admitted (writing) ──► stored ──► closing (record on its way) ──► closed ──► taken

Durable facts and what follows from them are in `book`.
"""

import re
from collections.abc import Sequence
from enum import StrEnum

from prorl_hpc.buffer.book import SUPERSEDED, GroupBook
from prorl_hpc.buffer.curriculum import SOLVED
from prorl_hpc.buffer.groups import Attempted, Location, OpenGroup, SlotState, reference
from prorl_hpc.buffer.manifest import Closed, Dropped, Validation
from prorl_hpc.buffer.messages import (
    VALIDATION_BASE,
    Claim,
    GroupIds,
    GroupRef,
    ValidationReply,
)
from prorl_hpc.buffer.mixture import group_seed
from prorl_hpc.records import Kind, Lease

GRACE_SECONDS = 5.0
"""A younger lease isn't missed in a heartbeat: its reply may still be on its way."""
RANDOM_NAME = re.compile(r"[0-9a-f]{12}(?:-[0-9a-f]{12})*")
"""Tokens of workers and environments: failures that differ by them alone are of one kind."""

MAX_FAILURE_KINDS = 30
MAX_FAILURE_CHARACTERS = 160


class Admission(StrEnum):
    """What is to be done with a pushed trajectory."""

    accept = "accept"
    """Write it, then call `stored`."""
    writing = "writing"
    """An equal one is being written: answer when that is durable."""
    duplicate = "duplicate"
    late = "late"
    retry = "retry"


class Dispatcher(GroupBook):
    """The state of all groups of a run."""

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

    def admit(self, t: Attempted, *, now: float) -> Admission:
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
        slot.solved = None if t.reward is None else t.reward >= SOLVED
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
            if group.kind is Kind.validation and group.deadline is None and self._due(group, now):
                # It ends even if no node ever takes it: the learner waits for it.
                group.deadline = now + self.config.group_deadline_seconds
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
        """Opens the groups of a validation; again for the same version: nothing changes.

        `counts`: instances per task; a task that has fewer gives all it has.
        What is open of older ones is given up: the learner waits for one at a time, so it has
        abandoned them, and nodes at work on them would keep the new one waiting. One that is asked
        for again after all is taken up where it was left.
        """
        self._supersede(version)
        wanted = self.opening.validation(version)
        if wanted is None:
            sizes = self.config.validation_sizes
            there = {task: min(count, sizes.get(task, count)) for task, count in counts.items()}
            line = Validation(version=version, counts=there, num_rollouts=num_rollouts)
            self._open_validation(line)
            self._lines.append(line)
            return
        for group_id in self.superseded.intersection(wanted.group_ids):
            self._take_up(wanted.open_group(group_id))

    def validation_results(self, version: int) -> ValidationReply:
        """What there is of a validation, and what is missing."""
        wanted = self.opening.validation(version)
        if wanted is None:
            return ValidationReply(groups=None)
        ids = wanted.group_ids
        refs = tuple(reference(self.closed[g]) for g in ids if g in self.closed)
        num_dropped = sum(g in self.dropped for g in ids)
        num_open = len(ids) - len(refs) - num_dropped
        return ValidationReply(
            groups=refs if num_open == 0 else None,
            num_dropped=num_dropped,
            num_open=num_open,
            closed=() if num_open == 0 else refs,
        )

    # --- inside

    def _supersede(self, version: int) -> None:
        """Gives up the open validation groups of versions before this one."""
        for group in list(self.open.values()):
            if group.kind is Kind.validation and (group.policy_version or 0) < version:
                self.counters["superseded"] += 1
                self._forget(group.group_id)
                line = Dropped(
                    group=group.group_id,
                    kind=group.kind,
                    reason=f"{SUPERSEDED} version {version} is validated now",
                )
                self._closing[group.group_id] = line
                self._lines.append(line)

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

    def _due(self, group: OpenGroup, now: float) -> bool:
        """Whether there are nodes that should be at work on the group."""
        present = self.leases.num_workers(now=now) > 0
        return present and self.handout.announced and self._timely(group)

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

    def _retry(self, group: OpenGroup, t: Attempted, *, now: float) -> bool:
        """Notes an infrastructure failure; whether the rollout is to be tried again."""
        self.counters[f"failure/{t.task}"] += 1
        said = RANDOM_NAME.sub("*", t.detail or t.finish_reason)
        what = f"{t.task}: {said}"[:MAX_FAILURE_CHARACTERS]
        full = what not in self.failures and len(self.failures) >= MAX_FAILURE_KINDS
        self.failures["others" if full else what] += 1
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

    def _too_late(self, t: Attempted) -> Admission:
        line = self.closed.get(t.group_id) or self._closing.get(t.group_id)
        if isinstance(line, Closed) and any(r[0] == t.rollout_index for r in line.rollouts):
            self.counters["duplicate"] += 1
            return Admission.duplicate
        self.counters["late"] += 1
        return Admission.late
