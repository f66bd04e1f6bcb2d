"""One rollout node at work: draws leases, produces, hands in. Knows no model and no socket's form.

    draw ---> produce (one task per rollout) ---> spool + queue ---> push ---> ack: forget
      ^                                                               |
      '---- heartbeat: keeps leases, drops revoked ones, hears of new versions ----'

Everything here runs in one event loop. The end is one of: the run is finished; the node was asked
to stop; the buffer is gone; a newer attempt took over; the node is sick.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from prorl_hpc.buffer.messages import (
    BufferGone,
    Fenced,
    HeartbeatReply,
    LeaseReply,
    Phase,
    PushResult,
    WireError,
)
from prorl_hpc.records import Kind, Lease, Outcome, Trajectory
from prorl_hpc.rollout.health import Health, State
from prorl_hpc.rollout.pipeline import Pipeline
from prorl_hpc.rollout.spool import Spool
from prorl_hpc.rollout.versions import Versions

log = logging.getLogger("prorl_hpc.rollout")

MAX_PUSH_TRAJECTORIES = 256
POLL_SECONDS = 0.2
METRICS_SECONDS = 5.0
LINGER_SECONDS = 0.01
"""What ends this close together goes in one push."""

SPOOL_SECONDS = 0.1
"""An ack that comes sooner spares the disk; a kill can cost this much of finished work."""

PROBE_GROUP = 0
"""Group id of a probe; its trajectory is never pushed."""


class Client(Protocol):
    """The buffer, as far as a rollout node talks to it."""

    async def lease(self, capacity: int) -> LeaseReply: ...

    async def heartbeat(self, lease_ids: Iterable[int]) -> HeartbeatReply: ...

    async def push(self, trajectories: list[Trajectory]) -> dict[tuple[int, int], PushResult]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Why the worker ended."""

    reason: str
    finished: bool = False
    """The run is done: no other attempt is to follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Numbers of one worker."""

    capacity: int
    """Rollouts at work at once."""
    heartbeat_seconds: float
    farewell_seconds: float = 30.0
    """Longest time to hand in what is done, once asked to stop."""


@dataclass(kw_only=True, slots=True)
class _Held:
    """A lease and what is still missing of it."""

    lease: Lease
    missing: set[int]
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)


@dataclass(kw_only=True, slots=True)
class Counters:
    """Totals since the start of this attempt."""

    trajectories: int = 0
    stored: int = 0
    sampled_tokens: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    results: dict[str, int] = field(default_factory=dict)

    def produced(self, trajectory: Trajectory) -> None:
        self.trajectories += 1
        self.sampled_tokens += int(trajectory.loss_mask.sum())
        for stage, seconds in trajectory.timings.items():
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + seconds

    def pushed(self, result: PushResult) -> None:
        self.results[result] = self.results.get(result, 0) + 1
        self.stored += result == "stored"


class Worker:
    """Runs until an end; `run` returns it."""

    def __init__(
        self,
        *,
        client: Client,
        pipeline: Pipeline,
        versions: Versions,
        spool: Spool,
        health: Health,
        terms: Terms,
        stop_reason: Callable[[], str],
        run_over: Callable[[], str] = lambda: "",
        report: Callable[["Worker"], None] = lambda _: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`stop_reason` is empty while the node may go on; `report` is called now and then.

        `run_over` says why no attempt is to follow where the buffer can't say so any more.
        """
        self.counters = Counters()
        self.health = health
        self.versions = versions
        self.pipeline = pipeline
        self.spool = spool
        self._client = client
        self._terms = terms
        self._stop_reason = stop_reason
        self._run_over = run_over
        self._report = report
        self._sleep = sleep
        self._held: dict[int, _Held] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """Cancelled with their lease, and still closing what they had open."""
        self._done: asyncio.Queue[Trajectory] = asyncio.Queue()
        self._unpushed: dict[tuple[int, int], Trajectory] = {}
        self._unspooled: list[Trajectory] = []
        self._spooling: asyncio.TimerHandle | None = None
        self._freed = asyncio.Event()
        self._end: End | None = None

    @property
    def in_flight(self) -> int:
        """Rollouts at work."""
        return len(self._tasks())

    async def run(self) -> End:
        """Works until an end, then hands in what is done and gives its leases back."""
        for trajectory in self.spool.recover():
            self._queue(trajectory)
        loops = [
            asyncio.create_task(loop, name=name)
            for name, loop in (
                ("draw", self._draw_forever()),
                ("heartbeat", self._heartbeat_forever()),
                ("push", self._push_forever()),
                ("follow", self.versions.follow()),
                ("report", self._report_forever()),
            )
        ]
        try:
            await self._until_an_end(loops)
            await self._farewell()
        finally:
            await _cancel([*loops, *self._tasks()])
            self._spool_unacked()
        assert self._end is not None
        self._report(self)
        return self._end

    async def _until_an_end(self, loops: list["asyncio.Task[None]"]) -> None:
        while self._end is None:
            if reason := self._stop_reason():
                self._finish(End(reason=reason))
                return
            if reason := self._run_over():
                self._finish(End(reason=reason, finished=True))
                return
            done, _ = await asyncio.wait(
                loops, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                self._finish(_end_of(task))

    def _finish(self, end: End) -> None:
        self._end = self._end or end

    async def _farewell(self) -> None:
        """Drops what isn't done, pushes what is, and lets others have the leases at once."""
        assert self._end is not None
        await _cancel(self._tasks())
        self._spool_unacked()
        if self._end.finished:
            return
        with contextlib.suppress(WireError, TimeoutError):
            async with asyncio.timeout(self._terms.farewell_seconds):
                while self._unpushed:
                    await self._push(list(self._unpushed.values())[:MAX_PUSH_TRAJECTORIES])
                await self._client.heartbeat(())

    def _tasks(self) -> list["asyncio.Task[None]"]:
        held = [task for held in self._held.values() for task in held.tasks]
        return [*held, *self._leaving]

    async def _draw_forever(self) -> None:
        while self._end is None:
            if self.health.state is not State.well:
                await self._probe()
                continue
            free = self._terms.capacity - self.in_flight
            # Not one request per finished rollout: wait until a good part of the node is free.
            if free < max(1, self._terms.capacity // 8) or self._crowded:
                await self._pause(POLL_SECONDS)
                continue
            reply = await self._client.lease(free)
            self._heard(reply.latest_version, reply.phase)
            for lease in reply.leases:
                self._take_on(lease)
            if not reply.leases:
                await self._pause(reply.retry_seconds)

    @property
    def _crowded(self) -> bool:
        """Whether too much waits for its ack already (the buffer is slow or away)."""
        return len(self._unpushed) > max(4 * self._terms.capacity, MAX_PUSH_TRAJECTORIES)

    async def _pause(self, seconds: float) -> None:
        self._freed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._freed.wait()

    def _take_on(self, lease: Lease) -> None:
        held = _Held(lease=lease, missing=set(lease.rollouts))
        self._held[lease.lease_id] = held
        for rollout_index in lease.rollouts:
            self.versions.bind(lease.policy_version)
            task = asyncio.create_task(self._produce(lease, rollout_index))
            held.tasks.add(task)
            task.add_done_callback(lambda done, held=held: self._ended(done, held))  # type: ignore[misc]

    async def _produce(self, lease: Lease, rollout_index: int) -> None:
        trajectory = await self.pipeline.produce(lease, rollout_index)
        self.health.record(trajectory.outcome, task=trajectory.task, detail=trajectory.detail)
        if trajectory.outcome is Outcome.infrastructure_failure:
            log.warning("rollout %s failed: %s", trajectory.key, trajectory.detail)
        self.counters.produced(trajectory)
        self._hand_in(trajectory)

    def _ended(self, task: "asyncio.Task[None]", held: _Held) -> None:
        held.tasks.discard(task)
        self._freed.set()
        if not task.cancelled() and task.exception() is not None:
            self._finish(End(reason=f"defect: {task.exception()!r}"))

    def _hand_in(self, trajectory: Trajectory) -> None:
        self._unspooled.append(trajectory)
        if self._spooling is None:
            loop = asyncio.get_running_loop()
            self._spooling = loop.call_later(SPOOL_SECONDS, self._spool_unacked)
        self._queue(trajectory)

    def _spool_unacked(self) -> None:
        """Writes what ended lately and isn't acked yet, together."""
        if self._spooling is not None:
            self._spooling.cancel()
            self._spooling = None
        unspooled, self._unspooled = self._unspooled, []
        waiting = [t for t in unspooled if self._unpushed.get(t.key) is t]
        if waiting:
            self.spool.put(*waiting)

    def _queue(self, trajectory: Trajectory) -> None:
        self._unpushed[trajectory.key] = trajectory
        self._done.put_nowait(trajectory)

    async def _push_forever(self) -> None:
        while True:
            batch = [await self._done.get()]
            await asyncio.sleep(LINGER_SECONDS)
            while len(batch) < MAX_PUSH_TRAJECTORIES and not self._done.empty():
                batch.append(self._done.get_nowait())
            await self._push(batch)

    async def _push(self, batch: list[Trajectory]) -> None:
        results = await self._client.push(batch)
        for key, result in results.items():
            self.counters.pushed(result)
            self.spool.remove(key)
            self._unpushed.pop(key, None)
            self._acked(key)
        if "fenced" in results.values():
            raise Fenced("a newer attempt of this node has taken over")

    def _acked(self, key: tuple[int, int]) -> None:
        group_id, rollout_index = key
        for lease_id, held in list(self._held.items()):
            if held.lease.group_id == group_id and rollout_index in held.missing:
                held.missing.discard(rollout_index)
                if not held.missing:
                    del self._held[lease_id]

    async def _heartbeat_forever(self) -> None:
        while True:
            await self._sleep(self._terms.heartbeat_seconds)
            reply = await self._client.heartbeat(tuple(self._held))
            self._heard(reply.latest_version, reply.phase)
            for lease_id in reply.revoked:
                if (held := self._held.pop(lease_id, None)) is not None:
                    self._let_go(held)

    def _let_go(self, held: _Held) -> None:
        """Without waiting for containers to close: the next heartbeat keeps the other leases."""
        for task in list(held.tasks):
            task.cancel()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    def _heard(self, latest_version: int, phase: Phase) -> None:
        self.versions.offer(latest_version)
        if phase == "finished":
            self._finish(End(reason="the run is finished", finished=True))

    async def _probe(self) -> None:
        """An attempt of the node's own, after a pause: shows whether it can work again."""
        log.warning("this node failed too often: %s", self.health.last_failure)
        await self._sleep(self.health.probe_delay_seconds)
        lease = probe_lease(self.health.last_failed_task)
        trajectory = await self.pipeline.produce(lease, 0)
        self.health.probed(trajectory.outcome, detail=trajectory.detail)
        if self.health.state is State.sick:
            reason = f"this node fails at everything: {self.health.last_failure}"
            self._finish(End(reason=reason))

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(METRICS_SECONDS)
            self._report(self)


def probe_lease(task: str) -> Lease:
    """A lease that nobody granted: the task's first validation instance."""
    return Lease(
        lease_id=0,
        group_id=PROBE_GROUP,
        kind=Kind.validation,
        task=task,
        instance_index=0,
        rollouts=(0,),
        num_rollouts=1,
        seed=0,
        policy_version=None,
        deadline_seconds=600.0,
    )


def _end_of(task: "asyncio.Task[None]") -> End:
    """What the end of one of the worker's loops means."""
    error = None if task.cancelled() else task.exception()
    if error is None:
        return End(reason=f"{task.get_name()} ended")
    if isinstance(error, BufferGone | Fenced | WireError):
        return End(reason=str(error))
    raise error


async def _cancel(tasks: list["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
