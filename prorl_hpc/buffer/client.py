"""The buffer as rollout nodes and the learner see it. Knows no dispatcher and no shard.

client = await RolloutClient.connect(locate_buffer(run), keys=..., run=run.name,
                                     worker="rollout-3", attempt=1)
reply = await client.lease(32)
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import msgspec

from hpc import endpoints
from hpc.rundir import RunDirectory
from prorl_hpc.buffer import frames
from prorl_hpc.buffer.channel import AsyncChannel, BlockingChannel, Identity, Locate
from prorl_hpc.buffer.keys import ClientKeys
from prorl_hpc.buffer.messages import (
    MAX_PUSH_BYTES,
    Announce,
    AnyRequest,
    Busy,
    Claim,
    Damaged,
    Done,
    Fenced,
    Finish,
    GroupIds,
    GroupRef,
    Heartbeat,
    HeartbeatReply,
    Hello,
    LeaseReply,
    LeaseRequest,
    Phase,
    Progress,
    Pulse,
    PushReply,
    PushResult,
    Refused,
    StatusReply,
    StatusRequest,
    Take,
    TakeReply,
    Validate,
    ValidationQuery,
    ValidationReply,
    WireError,
)
from prorl_hpc.records import Trajectory

R = TypeVar("R", bound=msgspec.Struct)

PATIENCE_SECONDS = 300.0
CREDIT_BYTES = 64 << 20
"""Bytes that one rollout client may have on the wire without an ack."""


def locate_buffer(run: RunDirectory) -> Locate:
    """Reads the endpoint that the buffer's newest attempt published."""

    def locate() -> str | None:
        endpoint = endpoints.read(run, "buffer")
        return endpoint.address if endpoint is not None and endpoint.run == run.name else None

    return locate


class Credit:
    """Bounds the bytes in flight; one message is let through however big it is."""

    def __init__(self, num_bytes: int) -> None:
        self._limit = num_bytes
        self._used = 0
        self._freed = asyncio.Condition()

    @asynccontextmanager
    async def take(self, num_bytes: int) -> AsyncIterator[None]:
        """Waits until there is room; gives it back at the end of the block."""
        async with self._freed:
            await self._freed.wait_for(
                lambda: self._used == 0 or self._used + num_bytes <= self._limit
            )
            self._used += num_bytes
        try:
            yield
        finally:
            self._used -= num_bytes
            async with self._freed:
                self._freed.notify_all()


class RolloutClient:
    """A rollout node's side. One event loop; calls may overlap (heartbeats during a push)."""

    def __init__(
        self,
        locate: Locate | str,
        *,
        keys: ClientKeys,
        run: str,
        worker: str,
        attempt: int,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._channel = AsyncChannel(
            _locator(locate),
            keys=keys,
            identity=Identity(run=run, worker=worker, attempt=attempt),
            patience_seconds=patience_seconds,
        )
        self._credit = Credit(CREDIT_BYTES)
        self._claims: dict[int, Claim] = {}
        self.busy: str = ""
        """Why the buffer takes no pushes just now (disk full, ...); empty when it does."""

    @classmethod
    async def connect(
        cls,
        locate: Locate | str,
        *,
        keys: ClientKeys,
        run: str,
        worker: str,
        attempt: int,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> "RolloutClient":
        """A client whose buffer has answered. Raises BufferGone after the patience, or Refused."""
        client = cls(
            locate,
            keys=keys,
            run=run,
            worker=worker,
            attempt=attempt,
            patience_seconds=patience_seconds,
        )
        try:
            await client._channel.ask(Hello())
        except BaseException:
            await client.close()
            raise
        return client

    async def lease(self, capacity: int) -> LeaseReply:
        """Leases of up to `capacity` rollouts; none means: ask again after `retry_seconds`."""
        reply = await self._channel.ask(LeaseRequest(capacity=capacity))
        granted = _expect(reply, LeaseReply)
        self._claims |= {
            lease.lease_id: Claim(
                lease_id=lease.lease_id, group_id=lease.group_id, rollouts=lease.rollouts
            )
            for lease in granted.leases
        }
        return granted

    async def heartbeat(self, lease_ids: Iterable[int]) -> HeartbeatReply:
        """Keeps exactly these leases; the buffer gives all others of this node to somebody else."""
        kept = set(lease_ids)
        self._claims = {i: claim for i, claim in self._claims.items() if i in kept}
        reply = await self._channel.ask(Heartbeat(claims=tuple(self._claims.values())))
        return _expect(reply, HeartbeatReply)

    async def push(self, trajectories: Sequence[Trajectory]) -> dict[tuple[int, int], PushResult]:
        """Result by key (group, rollout), once everything stored is durable.

        Waits as long as the buffer answers that it is busy (see `busy`). Raises RecordError for a
        bad trajectory before anything is sent, and BufferGone when nobody answers.
        """
        batches = list(_batches(trajectories))
        for trajectory in trajectories:
            trajectory.check()
        results = await asyncio.gather(*(self._push(batch) for batch in batches))
        return {key: result for part in results for key, result in part.items()}

    async def close(self) -> None:
        """Drops the socket; leases of this node end with their expiry, or by `heartbeat(())`."""
        await self._channel.close()

    async def _push(self, batch: list[Trajectory]) -> dict[tuple[int, int], PushResult]:
        async with self._credit.take(sum(t.num_bytes for t in batch)):
            body, arrays = frames.encode_push(batch)
            while True:
                try:
                    reply = await self._channel.ask(body, arrays=arrays)
                except Fenced:
                    return {t.key: "fenced" for t in batch}
                if not isinstance(reply, Busy):
                    break
                self.busy = reply.reason
                await asyncio.sleep(reply.retry_seconds)
        self.busy = ""
        results = _expect(reply, PushReply).results
        return {t.key: result for t, result in zip(batch, results, strict=True)}


class LearnerClient:
    """The learner's side: blocking, for one thread; a second thread keeps the buffer informed.

    Every announcement fences older attempts of the learner. A restarted buffer asks for the
    announcement again; the client gives it by itself, with the groups taken meanwhile.
    """

    def __init__(
        self,
        locate: Locate | str,
        *,
        keys: ClientKeys,
        run: str,
        attempt: int,
        worker: str = "learner",
        patience_seconds: float = PATIENCE_SECONDS,
        pulse_seconds: float = 10.0,
    ) -> None:
        self._locate = _locator(locate)
        self._keys = keys
        self._identity = Identity(run=run, worker=worker, attempt=attempt)
        self._patience_seconds = patience_seconds
        self._channel = self._open()
        self._announced: Announce | None = None
        self._held = GroupIds()
        self._validations: dict[int, Validate] = {}
        self._stop = threading.Event()
        self._pulse_seconds = pulse_seconds
        self._pulse: threading.Thread | None = None
        self.phase: Phase = "running"

    def announce(self, version: int, *, consumed: GroupIds, filtered: int, step: int) -> None:
        """Says where the learner stands (its checkpoint's cursor). First call of every attempt.

        `consumed`: training groups of the surviving history, whether trained, filtered out or
        dropped as stale; `filtered`: how many of them gave no sample (total). Raises Fenced when a
        newer attempt has announced itself.
        """
        self._held = GroupIds()
        self._announced = Announce(
            version=version, step=step, consumed=consumed, held=GroupIds(), filtered=filtered
        )
        self._done(self._announced)
        if self._pulse is None and self._pulse_seconds > 0:
            self._pulse = threading.Thread(target=self._beat, name="buffer-pulse", daemon=True)
            self._pulse.start()

    def take(self, num_groups: int, *, timeout_seconds: float) -> list[GroupRef]:
        """Closed training groups, each handed out once; fewer (or none) when time is up.

        May take a little longer than `timeout_seconds` while the buffer restarts.
        """
        deadline = time.monotonic() + timeout_seconds
        taken: list[GroupRef] = []
        while len(taken) < num_groups:
            left = max(deadline - time.monotonic(), 0.0)
            ask = Take(num_groups=num_groups - len(taken), timeout_seconds=min(left, 20.0))
            reply = _expect(self._ask(ask, wait_seconds=ask.timeout_seconds), TakeReply)
            self.phase = reply.phase
            taken.extend(reply.groups)
            self._held = self._held.union(ref.group_id for ref in reply.groups)
            if time.monotonic() >= deadline or self.phase != "running":
                break
        return taken

    def published(self, version: int) -> None:
        """A newer policy version is on disk."""
        self._progress(Progress(version=version))

    def filtered(self, total: int) -> None:
        """Total of groups consumed without a training sample: as many more may be leased."""
        self._progress(Progress(filtered=total))

    def checkpointed(self, step: int, consumed: GroupIds) -> None:
        """A checkpoint with this cursor is durable."""
        self._progress(Progress(step=step, checkpointed=consumed))

    def validate(self, version: int, counts: dict[str, int], num_rollouts: int) -> None:
        """Asks for a validation of `version`: the first `counts[task]` instances of each task."""
        ask = Validate(version=version, counts=counts, num_rollouts=num_rollouts)
        self._validations[version] = ask
        self._done(ask)

    def validation_results(
        self, version: int, timeout_seconds: float = 0.0
    ) -> list[GroupRef] | None:
        """Its groups once all are closed (without those given up), or None when time is up."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            ask = ValidationQuery(version=version, timeout_seconds=min(left, 20.0))
            reply = _expect(self._ask(ask, wait_seconds=ask.timeout_seconds), ValidationReply)
            if reply.groups is not None:
                self._validations.pop(version, None)
                return list(reply.groups)
            if time.monotonic() >= deadline:
                return None

    def damaged(self, shard: int, *, group_id: int, reason: str) -> None:
        """Reports a shard that can't be read; `group_id` will come again, made anew."""
        self._held = self._held.minus([group_id])
        self._done(Damaged(shard=shard, group_id=group_id, reason=reason))

    def heartbeat(self) -> Phase:
        """Tells the buffer that the learner lives (the pulse thread does it too)."""
        self._done(Pulse())
        return self.phase

    def status(self) -> StatusReply:
        """How the buffer is doing."""
        return _expect(self._ask(StatusRequest()), StatusReply)

    def finish(self, reason: str) -> None:
        """The run is done: rollout nodes and buffer end."""
        self._done(Finish(reason=reason))

    def close(self) -> None:
        """Stops the pulse and drops the socket."""
        self._stop.set()
        if self._pulse is not None:
            self._pulse.join(timeout=10)
        self._channel.close()

    def _progress(self, change: Progress) -> None:
        if self._announced is not None:
            old = self._announced
            self._announced = msgspec.structs.replace(
                old,
                version=old.version if change.version is None else change.version,
                step=old.step if change.step is None else change.step,
                filtered=old.filtered if change.filtered is None else change.filtered,
            )
        self._done(change)

    def _done(self, body: AnyRequest) -> None:
        self.phase = _expect(self._ask(body), Done).phase

    def _ask(self, body: AnyRequest, *, wait_seconds: float = 0.0) -> object:
        try:
            return self._channel.ask(body, wait_seconds=wait_seconds)
        except Refused as err:
            if self._announced is None or err.code != "announce":
                raise
        again = msgspec.structs.replace(self._announced, held=self._held)
        self._channel.ask(again)
        for validation in self._validations.values():
            self._channel.ask(validation)
        return self._channel.ask(body, wait_seconds=wait_seconds)

    def _open(self) -> BlockingChannel:
        return BlockingChannel(
            self._locate,
            keys=self._keys,
            identity=self._identity,
            patience_seconds=self._patience_seconds,
        )

    def _beat(self) -> None:
        channel = BlockingChannel(
            self._locate, keys=self._keys, identity=self._identity, patience_seconds=5.0
        )
        try:
            while not self._stop.wait(self._pulse_seconds):
                # The main thread hears of a lost or fencing buffer by its own next request.
                with suppress(WireError):
                    channel.ask(Pulse())
        finally:
            channel.close()


def fetch_status(
    locate: Locate | str, *, keys: ClientKeys, run: str, patience_seconds: float = 10.0
) -> StatusReply:
    """One question of an observer's. Raises BufferGone."""
    channel = BlockingChannel(
        _locator(locate),
        keys=keys,
        identity=Identity(run=run, worker="observer", attempt=0),
        patience_seconds=patience_seconds,
    )
    try:
        return _expect(channel.ask(StatusRequest()), StatusReply)
    finally:
        channel.close()


def _locator(locate: Locate | str) -> Locate:
    if isinstance(locate, str):
        address: str = locate
        return lambda: address
    return locate


def _batches(trajectories: Sequence[Trajectory]) -> Iterator[list[Trajectory]]:
    batch: list[Trajectory] = []
    size = 0
    for trajectory in trajectories:
        if batch and size + trajectory.num_bytes > MAX_PUSH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(trajectory)
        size += trajectory.num_bytes
    if batch:
        yield batch


def _expect(reply: object, want: type[R]) -> R:
    if not isinstance(reply, want):
        raise WireError(
            f"the buffer answered {type(reply).__name__} where {want.__name__} was expected; "
            "use one version of prorl-hpc for the whole run"
        )
    return reply
