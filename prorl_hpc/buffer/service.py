"""What the buffer answers to each request. Knows dispatcher and store, no socket.

Replies leave through `send`; those to pushes wait until the trajectories are durable, those to
long polls until there is something or their time is up.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prorl_hpc.buffer import frames
from prorl_hpc.buffer.dispatcher import Admission, Dispatcher
from prorl_hpc.buffer.manifest import Finished
from prorl_hpc.buffer.messages import (
    Announce,
    AnyReply,
    AnyRequest,
    Busy,
    Damaged,
    Done,
    Envelope,
    Finish,
    Heartbeat,
    HeartbeatReply,
    Hello,
    LeaseReply,
    LeaseRequest,
    Phase,
    Progress,
    Pulse,
    Push,
    PushReply,
    PushResult,
    Refusal,
    StatusReply,
    StatusRequest,
    Take,
    TakeReply,
    Validate,
    ValidationQuery,
)
from prorl_hpc.buffer.peers import Peer, Peers
from prorl_hpc.buffer.store import Sealed, Store

ROUTES: dict[type[AnyRequest], str] = {
    LeaseRequest: "rollout",
    Heartbeat: "rollout",
    Push: "rollout",
    Announce: "learner",
    Take: "learner",
    Progress: "learner",
    Validate: "learner",
    ValidationQuery: "learner",
    Damaged: "learner",
    Finish: "learner",
    Pulse: "learner",
}
"""Which role may ask what; the rest is for all."""

OUTCOMES: dict[Admission, PushResult] = {
    Admission.duplicate: "duplicate",
    Admission.late: "late",
    Admission.retry: "retry",
}

IDLE_RETRY_SECONDS = 0.5
EARLY = (Announce, Pulse, Hello, StatusRequest)
"""What a learner may ask before it has announced itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a reply goes."""

    identity: bytes
    envelope: Envelope


@dataclass(kw_only=True, slots=True)
class _Poll:
    address: Address
    peer: Peer
    body: Take | ValidationQuery
    deadline: float


@dataclass(kw_only=True, slots=True)
class _PushWait:
    address: Address
    peer: Peer
    keys: list[tuple[int, int]]
    results: dict[tuple[int, int], PushResult]
    missing: set[tuple[int, int]] = field(default_factory=set)


class Service:
    """Requests in, replies out; call `advance` often."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        store: Store,
        run: str,
        max_pending_bytes: int,
        send: Callable[[Address, AnyReply], None],
        quarantine: Callable[[int, str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dispatcher = dispatcher
        self.store = store
        self.peers = Peers()
        self.phase: Phase = "running"
        self.end_reason = ""
        self.counters: Counter[str] = Counter()
        self.last_stored = now()
        self._run = run
        self._max_pending_bytes = max_pending_bytes
        self._send = send
        self._quarantine = quarantine
        self._now = now
        self._polls: list[_Poll] = []
        self._waits: dict[tuple[int, int], list[_PushWait]] = {}

    def handle(
        self, address: Address, role: str, body: AnyRequest, arrays: Sequence[frames.Frame]
    ) -> None:
        """Answers now, or later. Raises WireError for a push whose frames don't fit."""
        envelope = address.envelope
        if envelope.run != self._run:
            reason = f"run {envelope.run!r} is not this buffer's run {self._run!r}"
            return self._send(address, Refusal(code="run", reason=reason))
        wanted = ROUTES.get(type(body), role)
        if wanted != role:
            reason = f"{type(body).__name__} is for the {wanted}, and this is a key of {role}"
            return self._send(address, Refusal(code="role", reason=reason))
        if role == "observer" or isinstance(body, Hello | StatusRequest):
            return self._send(address, self.status())
        peer, replaced = self.peers.meet(role, envelope, now=self._now())
        if peer is None:
            return self._send(address, self._fenced(envelope))
        if replaced and role == "rollout":
            self.dispatcher.worker_replaced(peer.worker, now=self._now())
        known = peer.replies.get(envelope.request)
        if known is not None and isinstance(body, LeaseRequest | Take | Push):
            return self._send(address, known)
        if role == "rollout":
            return self._rollout(address, peer, body, arrays)
        return self._learner(address, peer, body)

    def advance(self) -> None:
        """Collects what has become durable, ends what is overdue, answers what can be."""
        now = self._now()
        for sealed in self.store.sealed():
            self._sealed(sealed)
        self.dispatcher.tick(now)
        self.store.record(self.dispatcher.drain_lines())
        polls, self._polls = self._polls, []
        for poll in polls:
            if not self._answer_poll(poll, now=now):
                self._polls.append(poll)

    def drain(self, reason: str) -> None:
        """Leases nothing more; everybody is told that this attempt ends."""
        if self.phase == "running":
            self.phase, self.end_reason = "draining", reason

    @property
    def settled(self) -> bool:
        """Nothing is on its way to the disk, and nobody waits for a reply."""
        return self.store.idle and not self._waits and not self._polls

    def status(self) -> StatusReply:
        """The buffer in numbers."""
        d, now = self.dispatcher, self._now()
        heard = self.peers.newest("learner")
        return StatusReply(
            run=self._run,
            phase=self.phase,
            note=self.store.paused or self.end_reason,
            latest_version=self.latest_version,
            step=d.handout.step,
            groups_open=len(d.open),
            groups_ready=d.handout.num_ready,
            groups_closed=len(d.closed),
            groups_dropped=len(d.dropped),
            trajectories=d.counters["trajectories"],
            stored_bytes=self.store.stored_bytes,
            leases=len(d.leases),
            workers=d.leases.num_workers(now=now),
            learner_seconds=None if heard is None else now - heard,
            counters=dict(d.counters + self.counters + Counter(extreme=d.opening.num_extreme)),
            failures=dict(d.failures),
            num_shards=self.store.num_shards,
        )

    @property
    def latest_version(self) -> int:
        """Newest policy version that the learner has told of."""
        d = self.dispatcher
        return d.handout.version if d.handout.announced else d.capacity.newest_version

    # --- rollout nodes

    def _rollout(
        self, address: Address, peer: Peer, body: AnyRequest, arrays: Sequence[frames.Frame]
    ) -> None:
        now = self._now()
        peer.told_end = self.phase != "running"
        if isinstance(body, LeaseRequest):
            running = self.phase == "running" and not self.store.paused
            leases = (
                self.dispatcher.lease(peer.worker, capacity=body.capacity, now=now)
                if running
                else []
            )
            reply = LeaseReply(
                leases=tuple(leases),
                latest_version=self.latest_version,
                phase=self.phase,
                retry_seconds=IDLE_RETRY_SECONDS,
            )
            peer.remember(address.envelope.request, reply)
            self._send(address, reply)
        elif isinstance(body, Heartbeat):
            lost = self.dispatcher.heartbeat(peer.worker, body.claims, now=now)
            self._send(
                address,
                HeartbeatReply(
                    revoked=tuple(lost), latest_version=self.latest_version, phase=self.phase
                ),
            )
        elif isinstance(body, Push):
            self._push(address, peer, body, arrays)

    def _push(
        self, address: Address, peer: Peer, body: Push, arrays: Sequence[frames.Frame]
    ) -> None:
        if self.store.paused:
            return self._send(address, Busy(reason=self.store.paused, retry_seconds=1.0))
        if self.store.pending_bytes > self._max_pending_bytes:
            self.counters["back_pressure"] += 1
            return self._send(address, Busy(reason="the disk is behind", retry_seconds=0.1))
        parcels = frames.decode_push(body, arrays)
        wait = _PushWait(address=address, peer=peer, keys=[p.key for p in parcels], results={})
        accepted = []
        for parcel in parcels:
            admission = self.dispatcher.admit(parcel, now=self._now())
            if admission is Admission.accept:
                accepted.append(parcel)
            if admission in (Admission.accept, Admission.writing):
                wait.missing.add(parcel.key)
                self._waits.setdefault(parcel.key, []).append(wait)
            else:
                wait.results[parcel.key] = OUTCOMES[admission]
        if accepted:
            self.store.submit(accepted)
        if not wait.missing:
            self._answer_push(wait)
        return None

    def _sealed(self, sealed: Sealed) -> None:
        for parcel, location in sealed.trajectories:
            self.last_stored = self._now()
            self.dispatcher.stored(
                parcel.group_id,
                parcel.rollout_index,
                location=location,
                usable=parcel.outcome.usable,
            )
            for wait in self._waits.pop(parcel.key, ()):
                wait.missing.discard(parcel.key)
                wait.results[parcel.key] = "stored"
                if not wait.missing:
                    self._answer_push(wait)
        for line in sealed.lines:
            self.dispatcher.recorded(line)

    def _answer_push(self, wait: _PushWait) -> None:
        reply = PushReply(results=tuple(wait.results[key] for key in wait.keys))
        wait.peer.remember(wait.address.envelope.request, reply)
        self._send(wait.address, reply)

    # --- learner

    def _learner(self, address: Address, peer: Peer, body: AnyRequest) -> None:
        peer.told_end = self.phase != "running"
        if isinstance(body, Announce):
            self.dispatcher.announce(
                version=body.version,
                step=body.step,
                filtered=body.filtered,
                consumed=body.consumed,
                held=body.held,
            )
            peer.announced = True
        elif not peer.announced and not isinstance(body, EARLY):
            reason = "this buffer doesn't know where the learner stands; announce it"
            return self._send(address, Refusal(code="announce", reason=reason))
        if isinstance(body, Take | ValidationQuery):
            return self._poll(address, peer, body)
        self._note(body)
        return self._send(address, Done(phase=self.phase))

    def _note(self, body: AnyRequest) -> None:
        d = self.dispatcher
        if isinstance(body, Progress):
            d.advance(version=body.version, step=body.step, filtered=body.filtered)
            if body.checkpointed is not None:
                self.counters["checkpointed"] = len(body.checkpointed)
        elif isinstance(body, Validate):
            d.validate(version=body.version, counts=body.counts, num_rollouts=body.num_rollouts)
        elif isinstance(body, Damaged):
            if d.moved(body.shard):
                d.again(body.group_id)
            else:
                self._quarantine(body.shard, body.reason)
                d.quarantine(body.shard, reason=body.reason, group_id=body.group_id)
        elif isinstance(body, Finish):
            self.phase, self.end_reason = "finished", body.reason
            for peer in self.peers.of("rollout"):
                peer.told_end = False
            self.store.record([Finished(reason=body.reason)])

    def _poll(self, address: Address, peer: Peer, body: Take | ValidationQuery) -> None:
        number, session = address.envelope.request, address.envelope.session
        self._polls = [
            poll
            for poll in self._polls
            if (poll.address.envelope.request, poll.peer.session) != (number, session)
        ]
        deadline = self._now() + body.timeout_seconds
        poll = _Poll(address=address, peer=peer, body=body, deadline=deadline)
        if not self._answer_poll(poll, now=self._now()):
            self._polls.append(poll)

    def _answer_poll(self, poll: _Poll, *, now: float) -> bool:
        """Answers if it is time to; True when the poll is over."""
        poll.peer.told_end = poll.peer.told_end or self.phase != "running"
        due = now >= poll.deadline or self.phase != "running"
        if not any(p is poll.peer for p in self.peers.of("learner")):
            self._send(poll.address, self._fenced(poll.address.envelope))
            return True
        if isinstance(poll.body, ValidationQuery):
            found = self.dispatcher.validation_results(poll.body.version)
            if found.groups is None and not due:
                return False
            self._send(poll.address, found)
            return True
        if self.dispatcher.handout.num_ready < poll.body.num_groups and not due:
            return False
        groups = self.dispatcher.take(poll.body.num_groups)
        if len(groups) < poll.body.num_groups and not due:
            # Only in deterministic mode: ready, but an earlier group is still open.
            self.dispatcher.give_back(groups)
            return False
        reply = TakeReply(groups=tuple(groups), phase=self.phase)
        poll.peer.remember(poll.address.envelope.request, reply)
        self._send(poll.address, reply)
        return True

    def _fenced(self, envelope: Envelope) -> Refusal:
        self.counters["fenced"] += 1
        return Refusal(
            code="fenced",
            reason=f"{envelope.worker} attempt {envelope.attempt} was replaced by a newer one",
        )
