"""The state of one open group, rollout by rollout. Pure: no clock, no file, no socket."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from prorl_hpc.buffer.manifest import Closed, Moves
from prorl_hpc.buffer.messages import GroupRef
from prorl_hpc.buffer.parcel import Parcel
from prorl_hpc.records import Kind, Trajectory

Location = tuple[int, int]
"""(shard, row)."""

Attempted = Trajectory | Parcel
"""What decides on groups: the arrays' form doesn't matter to it."""


class SlotState(StrEnum):
    """Where one rollout of a group stands."""

    missing = "missing"
    leased = "leased"
    writing = "writing"
    """Received, not durable yet."""
    stored = "stored"


@dataclass(kw_only=True, slots=True)
class Slot:
    """One rollout of an open group."""

    state: SlotState = SlotState.missing
    lease_id: int | None = None
    location: Location | None = None
    usable: bool = False
    solved: bool | None = None
    """Whether its reward counts as solved; None when it isn't known."""
    num_failures: int = 0
    avoid: str = ""
    """Worker that lost it; another one is preferred ..."""
    avoid_until: float = 0.0
    """... until then."""


@dataclass(kw_only=True, slots=True)
class OpenGroup:
    """A group that is being made."""

    group_id: int
    kind: Kind
    task: str
    instance_index: int
    num_rollouts: int
    min_usable: int
    policy_version: int | None
    context_tokens: int | None
    deadline: float | None = None
    """Clock time; None before its first lease."""
    one_instance: bool = False
    """Whether a rollout of another instance than the first one's is refused."""
    retried: bool = False
    instance_id: str = ""
    slots: list[Slot] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.slots:
            self.slots = [Slot() for _ in range(self.num_rollouts)]

    @property
    def complete(self) -> bool:
        return all(slot.state is SlotState.stored for slot in self.slots)

    @property
    def writing(self) -> bool:
        return any(slot.state is SlotState.writing for slot in self.slots)

    @property
    def num_usable(self) -> int:
        return sum(slot.state is SlotState.stored and slot.usable for slot in self.slots)

    @property
    def has_missing(self) -> bool:
        return any(slot.state is SlotState.missing for slot in self.slots)

    def missing(self, *, worker: str, now: float, alone: bool) -> list[int]:
        """Rollouts that this worker may be given; `alone`: no other worker is there."""
        return [
            index
            for index, slot in enumerate(self.slots)
            if slot.state is SlotState.missing
            and (alone or slot.avoid != worker or now >= slot.avoid_until)
        ]

    def lose(self, rollouts: Iterable[int], *, lease_id: int, worker: str, until: float) -> None:
        """Takes leased rollouts back from a lease that ended without them."""
        for index in rollouts:
            slot = self.slots[index]
            if slot.state is SlotState.leased and slot.lease_id == lease_id:
                slot.state, slot.lease_id = SlotState.missing, None
                slot.avoid, slot.avoid_until = worker, until

    def store(self, rollout: int, *, location: Location, usable: bool) -> None:
        """The rollout is durable."""
        slot = self.slots[rollout]
        slot.state, slot.lease_id = SlotState.stored, None
        slot.location, slot.usable = location, usable

    @property
    def lease_ids(self) -> set[int]:
        return {slot.lease_id for slot in self.slots if slot.lease_id is not None}

    def grant(self, rollouts: Iterable[int], *, lease_id: int) -> None:
        """These rollouts are being made under a lease."""
        for index in rollouts:
            slot = self.slots[index]
            slot.state, slot.lease_id = SlotState.leased, lease_id

    def fits(self, t: Attempted) -> bool:
        """Whether the trajectory is what a lease of this group asks for."""
        if t.task != self.task or t.kind is not self.kind:
            return False
        if self.one_instance and self.instance_id not in ("", t.instance_id):
            return False
        pinned = self.policy_version
        return pinned is None or t.sampled_only_by(pinned)

    def lose_shard(self, shard: int) -> int:
        """What lay in that shard is missing again; how many rollouts that are."""
        lost = [s for s in self.slots if s.location is not None and s.location[0] == shard]
        for slot in lost:
            slot.state, slot.location = SlotState.missing, None
        return len(lost)

    def relocate(self, moves: Moves) -> None:
        """Some of its rollouts lie elsewhere now."""
        for slot in self.slots:
            if slot.location is not None:
                slot.location = moves.place(*slot.location)

    def closed(self, *, reason: str) -> Closed:
        """The record of its closing, with what is stored by now."""
        known = [s.solved for s in self.slots if s.usable and s.solved is not None]
        return Closed(
            num_solved=sum(known),
            num_known=len(known),
            group=self.group_id,
            kind=self.kind,
            task=self.task,
            instance_id=self.instance_id,
            num_rollouts=self.num_rollouts,
            rollouts=tuple(
                (index, *slot.location, slot.usable)
                for index, slot in enumerate(self.slots)
                if slot.location is not None
            ),
            reason=reason,
        )


def reference(line: Closed) -> GroupRef:
    """The learner's view of a closed group."""
    return GroupRef(
        group_id=line.group,
        kind=line.kind,
        task=line.task,
        instance_id=line.instance_id,
        members=tuple((shard, row) for _, shard, row, usable in line.rollouts if usable),
        num_rollouts=line.num_rollouts,
    )
