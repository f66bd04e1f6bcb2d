"""The buffer as rollout nodes and the learner see it. Knows no dispatcher and no shard.

client = await RolloutClient.connect(locate_buffer(run), keys=..., run=run.name,
                                     worker="rollout-3", attempt=1)
reply = await client.lease(32)
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from hpc import endpoints
from hpc.rundir import RunDirectory
from prorl_hpc.buffer import frames
from prorl_hpc.buffer.channel import (
    AsyncChannel,
    BlockingChannel,
    Identity,
    Locate,
    expect,
    locator,
)
from prorl_hpc.buffer.keys import ClientKeys
from prorl_hpc.buffer.learner_client import PATIENCE_SECONDS
from prorl_hpc.buffer.learner_client import LearnerClient as LearnerClient
from prorl_hpc.buffer.messages import (
    MAX_PUSH_BYTES,
    Busy,
    Claim,
    Fenced,
    Heartbeat,
    HeartbeatReply,
    Hello,
    LeaseReply,
    LeaseRequest,
    PushReply,
    PushResult,
    StatusReply,
    StatusRequest,
)
from prorl_hpc.records import Trajectory

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
            locator(locate),
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

    @property
    def silent_seconds(self) -> float:
        """Since the buffer's last answer."""
        return self._channel.silent_seconds

    async def lease(self, capacity: int) -> LeaseReply:
        """Leases of up to `capacity` rollouts; none means: ask again after `retry_seconds`."""
        reply = await self._channel.ask(LeaseRequest(capacity=capacity))
        granted = expect(reply, LeaseReply)
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
        return expect(reply, HeartbeatReply)

    async def push(self, trajectories: Sequence[Trajectory]) -> dict[tuple[int, int], PushResult]:
        """Result by key (group, rollout), once everything stored is durable.

        Waits as long as the buffer answers that it is busy (see `busy`). Raises RecordError for a
        bad trajectory before anything is sent, and BufferGone when nobody answers.
        """
        batches = list(_batches(trajectories))
        if len(batches) > 1:  # each is checked when its turn comes, but by then others are sent
            for trajectory in trajectories:
                trajectory.check()
        results = await asyncio.gather(*(self._push(batch) for batch in batches))
        return {key: result for part in results for key, result in part.items()}

    async def close(self) -> None:
        """Drops the socket; leases of this node end with their expiry, or by `heartbeat(())`."""
        await self._channel.close()

    def _release(self, keys: Iterable[tuple[int, int]]) -> None:
        """These rollouts aren't this node's any more, whatever became of them.

        One that is to be tried again least of all: claimed on, nobody else would get it.
        """
        done: dict[int, set[int]] = {}
        for group_id, rollout in keys:
            done.setdefault(group_id, set()).add(rollout)
        touched = [claim for claim in self._claims.values() if claim.group_id in done]
        for claim in touched:
            left = tuple(r for r in claim.rollouts if r not in done[claim.group_id])
            if not left:
                del self._claims[claim.lease_id]
            elif left != claim.rollouts:
                self._claims[claim.lease_id] = msgspec.structs.replace(claim, rollouts=left)

    async def _push(self, batch: list[Trajectory]) -> dict[tuple[int, int], PushResult]:
        async with self._credit.take(sum(t.num_bytes for t in batch)):
            body, arrays = frames.encode_push(batch)
            while True:
                try:
                    reply = await self._channel.ask(body, arrays=arrays)
                except Fenced:
                    self._release(t.key for t in batch)
                    return {t.key: "fenced" for t in batch}
                if not isinstance(reply, Busy):
                    break
                self.busy = reply.reason
                await asyncio.sleep(reply.retry_seconds)
        self.busy = ""
        results = expect(reply, PushReply).results
        self._release(t.key for t in batch)
        return {t.key: result for t, result in zip(batch, results, strict=True)}


def fetch_status(
    locate: Locate | str, *, keys: ClientKeys, run: str, patience_seconds: float = 10.0
) -> StatusReply:
    """One question of an observer's. Raises BufferGone."""
    channel = BlockingChannel(
        locator(locate),
        keys=keys,
        identity=Identity(run=run, worker="observer", attempt=0),
        patience_seconds=patience_seconds,
    )
    try:
        return expect(channel.ask(StatusRequest()), StatusReply)
    finally:
        channel.close()


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
