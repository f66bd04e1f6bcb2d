"""What buffer, rollout nodes and learner say to each other. Knows no socket and no file.

Every message is one msgpack struct of a tagged union behind an `Envelope`; trajectories add raw
array frames (see `frames`). docs/protocol.md is the prose of this file.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from hpc.errors import HpcError
from prorl_hpc.records import Kind, Lease

FORMAT = 2
"""Format number of the wire; either side refuses another one."""

VALIDATION_BASE = 1 << 40
"""Group ids from here on are validation groups; below are training groups."""

MAX_FRAME_BYTES = 256 << 20
"""Largest frame that either side accepts."""

MAX_PUSH_BYTES = 16 << 20
"""A client splits its pushes into messages of about this size (one trajectory may exceed it)."""

Phase = Literal["running", "draining", "finished"]
"""`draining`: the buffer stops in good order and another attempt follows; `finished`: run done."""

PushResult = Literal["stored", "duplicate", "late", "fenced", "retry"]
"""What became of one pushed trajectory; whatever it is, the node may forget its copy.

`stored`: durable. `duplicate`: that (group, rollout) was durable before. `late`: its group is
closed (or pinned to another policy version). `fenced`: a newer attempt of this worker exists.
`retry`: an infrastructure failure that was noted; the rollout will be leased again.
"""


class WireError(HpcError, ConnectionError):
    """The other side can't be reached, or said something that can't be understood."""


class BufferGone(WireError, TimeoutError):
    """No answer from the buffer within the client's patience."""


class Fenced(WireError):
    """A newer attempt of this worker has taken over; this one must stop."""


class Refused(WireError):
    """The buffer refused the request; asking again in the same way won't help."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class GroupIds(msgspec.Struct, frozen=True):
    """A set of group ids as sorted, disjoint half-open ranges: compact for cursors."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ids: Iterable[int]) -> "GroupIds":
        return cls().union(cls(tuple((i, i + 1) for i in sorted(set(ids)))))

    def union(self, other: "GroupIds | Iterable[int]") -> "GroupIds":
        """All ids of both."""
        if not isinstance(other, GroupIds):
            other = GroupIds.of(other)
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(self.ranges + other.ranges):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return GroupIds(tuple(merged))

    def minus(self, ids: Iterable[int]) -> "GroupIds":
        """All ids but these."""
        ranges = list(self.ranges)
        for i in set(ids):
            ranges = [
                part
                for start, stop in ranges
                for part in ([(start, i), (i + 1, stop)] if start <= i < stop else [(start, stop)])
                if part[0] < part[1]
            ]
        return GroupIds(tuple(ranges))

    def __contains__(self, group_id: int) -> bool:
        low, high = 0, len(self.ranges)
        while low < high:
            middle = (low + high) // 2
            if self.ranges[middle][1] <= group_id:
                low = middle + 1
            else:
                high = middle
        return low < len(self.ranges) and self.ranges[low][0] <= group_id

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.ranges:
            yield from range(start, stop)


class GroupRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where the usable trajectories of a closed group lie, in the order of rollout index."""

    group_id: int
    kind: Kind
    task: str
    instance_id: str
    members: tuple[tuple[int, int], ...]
    """(shard number, row) of each trajectory."""
    num_rollouts: int
    """Rollouts that the group was to have; `members` may be fewer (masked, late)."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """First frame of every message, in both directions."""

    format: int
    run: str
    """Run id; a buffer answers only clients of its own run."""
    worker: str
    attempt: int
    session: int
    """Random per client object: tells two processes with one attempt number apart."""
    request: int
    """Echoed in the reply. The same number again means the same request again."""


class Row(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One trajectory of a push without its arrays."""

    group_id: int
    rollout_index: int
    kind: str
    task: str
    instance_id: str
    length: int
    """Tokens."""
    reward: float | None
    components: dict[str, float]
    outcome: str
    finish_reason: str
    timings: dict[str, float]
    isolation: dict[str, str]
    worker: str
    attempt: int
    detail: str
    num_logprobs: int = 0
    """Those of the sampled tokens, or `length`."""
    num_runs: int = 0
    """How often mask or version change in it, and one."""


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of what clients ask."""


class Hello(Request, frozen=True, kw_only=True):
    """Are you the buffer of my run? Answered with `StatusReply`."""


class LeaseRequest(Request, frozen=True, kw_only=True):
    """Rollout node: up to `capacity` rollouts to produce."""

    capacity: int


class Claim(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A lease as its node knows it: enough to revive it in a restarted buffer."""

    lease_id: int
    group_id: int
    rollouts: tuple[int, ...]


class Heartbeat(Request, frozen=True, kw_only=True):
    """Rollout node: alive, and at work on these leases (others of its leases are given back)."""

    claims: tuple[Claim, ...]


class Push(Request, frozen=True, kw_only=True):
    """Rollout node: finished trajectories; array frames follow."""

    rows: tuple[Row, ...]
    blocks: tuple[int, ...] = ()
    """How many rows each pair of array frames (tokens, logprobs) holds."""


class Announce(Request, frozen=True, kw_only=True):
    """Learner: at start, and again when the buffer was restarted."""

    version: int
    step: int
    consumed: GroupIds
    """Groups of the surviving history: trained, filtered or dropped as stale."""
    held: GroupIds
    """Groups taken since, in the learner's memory."""
    filtered: int
    """How many of the consumed groups gave no training sample (they are to be replaced)."""


class Take(Request, frozen=True, kw_only=True):
    """Learner: up to `num_groups` closed groups; answered when they are there or time is up."""

    num_groups: int
    timeout_seconds: float


class Progress(Request, frozen=True, kw_only=True):
    """Learner: its counters, all totals, each None when unchanged."""

    version: int | None = None
    """Newest published policy version."""
    step: int | None = None
    filtered: int | None = None
    checkpointed: GroupIds | None = None
    """Groups consumed up to the newest durable checkpoint."""


class Validate(Request, frozen=True, kw_only=True):
    """Learner: sample these many validation instances per task with `version`."""

    version: int
    counts: dict[str, int]
    num_rollouts: int


class ValidationQuery(Request, frozen=True, kw_only=True):
    """Learner: the closed groups of a validation, once all are closed."""

    version: int
    timeout_seconds: float


class Damaged(Request, frozen=True, kw_only=True):
    """Learner: this shard can't be read; quarantine it and make its trajectories again."""

    shard: int
    group_id: int
    """The group that was to be read: it isn't trained yet."""
    reason: str


class Finish(Request, frozen=True, kw_only=True):
    """Learner: the run is done; everyone may go home."""

    reason: str


class Pulse(Request, frozen=True, kw_only=True):
    """Learner: alive."""


class StatusRequest(Request, frozen=True, kw_only=True):
    """Anyone: how is it going?"""


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of what the buffer answers."""


class LeaseReply(Reply, frozen=True, kw_only=True):
    leases: tuple[Lease, ...]
    latest_version: int
    phase: Phase
    retry_seconds: float
    """When to ask again if there was nothing."""


class HeartbeatReply(Reply, frozen=True, kw_only=True):
    revoked: tuple[int, ...]
    """Leases that are no longer the node's: stop working on them."""
    latest_version: int
    phase: Phase


class PushReply(Reply, frozen=True, kw_only=True):
    results: tuple[PushResult, ...]
    """One per row, in order; sent only when everything `stored` is durable."""


class Busy(Reply, frozen=True, kw_only=True):
    """The push was not taken (back-pressure, disk full); keep it and send it again."""

    reason: str
    retry_seconds: float


class TakeReply(Reply, frozen=True, kw_only=True):
    groups: tuple[GroupRef, ...]
    phase: Phase


class ValidationReply(Reply, frozen=True, kw_only=True):
    groups: tuple[GroupRef, ...] | None
    """None: not all closed yet."""
    num_dropped: int = 0
    """Groups of the validation that were given up (infrastructure failures)."""
    num_open: int = 0
    """Groups that are neither closed nor given up yet."""
    closed: tuple[GroupRef, ...] = ()
    """While some are open: those that are there."""


class Done(Reply, frozen=True, kw_only=True):
    phase: Phase


class StatusReply(Reply, frozen=True, kw_only=True):
    run: str
    phase: Phase
    note: str
    """One line for people: what it waits for, or what is wrong; empty when all is well."""
    latest_version: int
    step: int
    groups_open: int
    groups_ready: int
    """Closed, not taken."""
    groups_closed: int
    groups_dropped: int
    trajectories: int
    stored_bytes: int
    leases: int
    workers: int
    learner_seconds: float | None
    """Since the learner was last heard; None: never."""
    counters: dict[str, int]
    """Late, duplicate, fenced, lost, failures by task, ..."""
    failures: dict[str, int] = {}
    """Infrastructure failures by task and what went wrong."""
    num_shards: int = 0


class Refusal(Reply, frozen=True, kw_only=True):
    """Not done, and why."""

    code: Literal["fenced", "announce", "role", "malformed", "run"]
    reason: str


AnyRequest = (
    Hello | LeaseRequest | Heartbeat | Push | Announce | Take | Progress | Validate
    | ValidationQuery | Damaged | Finish | Pulse | StatusRequest
)  # fmt: skip
AnyReply = (
    LeaseReply | HeartbeatReply | PushReply | Busy | TakeReply | ValidationReply | Done
    | StatusReply | Refusal
)  # fmt: skip
