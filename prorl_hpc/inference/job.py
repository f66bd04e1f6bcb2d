"""An inference job at work: its engine behind HTTP, announced while it is well, drained at the end.

    policy/latest --> versions --> engine <-- gateway <-- rollout nodes
                                     '-- well? --> announcement with a beat, else withdrawn

Ends when the run is over, when it is asked to, when its engine is dead, when a newer attempt took
its place, and when nobody has asked anything for long. Knows no engine by name.
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import uvicorn

from hpc import endpoints
from hpc.allocation import Allocation, StopFlag
from prorl_hpc.inference.announce import load_token
from prorl_hpc.inference.engine import Engine
from prorl_hpc.inference.gateway import MAX_BODY_BYTES, Gateway
from prorl_hpc.inference.herald import Herald
from prorl_hpc.observe.metrics import MetricsWriter
from prorl_hpc.over import LearnerWatch, learner_end
from prorl_hpc.policy import PolicyError, latest_version
from prorl_hpc.recipe import Recipe, load_recipe
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.run import Run
from prorl_hpc.service.gate import Gate

log = logging.getLogger("prorl_hpc.inference")

POLL_SECONDS = 0.5
METRICS_SECONDS = 5.0
TERMINATE_DRAIN_SECONDS = 20.0
"""After SIGTERM: within the 30 s that Slurm leaves a preempted job unless configured otherwise."""

T = TypeVar("T")

BEHIND_SECONDS = 180.0
"""A server that can't load what was published for so long is replaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Why the job ended."""

    reason: str
    finished: bool = False
    """Nothing is left to serve: no other attempt is to follow."""


def of_job(recipe: Recipe) -> Recipe:
    """The recipe as an engine factory reads it inside an inference job: these GPUs are its own."""
    gpus = recipe.inference.gpus_per_node
    return replace(recipe, rollout=replace(recipe.rollout, gpus_per_node=gpus))


async def serve(run: Run, *, allocation: Allocation, stop: StopFlag) -> End:
    """One attempt of an inference job, from its start to its end.

    Raises UserError for what the user must mend, PeerMissing where no policy is published.
    """
    from prorl_hpc.rollout.node import await_policy, engine_at

    recipe = of_job(load_recipe(run.recipe))
    token = load_token(run)
    if over := learner_end(run):
        return End(reason=over.reason, finished=True)
    version = await await_policy(run, recipe, stop=stop)
    async with AsyncExitStack() as stack:
        opening = stack.enter_async_context(engine_at(recipe, run, version))
        opened = await _unless_stopped(opening, stop)
        if opened is None:
            return End(reason=stop.reason)
        engine, digest = opened
        versions = Versions(engine, run=run, digest=digest)
        gateway = Gateway(
            engine,
            versions,
            identity=secrets.token_hex(8),
            hang_seconds=recipe.rollout.engine.request_seconds,
            is_ready=lambda: is_ready(engine),
            hint=lambda told: offer_if_published(run, versions, told),
            is_gone=lambda asked: asked < engine.version and not run.policy(asked).is_dir(),
        )
        stack.push_async_callback(gateway.close)
        listener = stack.enter_context(listening(endpoints.own_address(environment=os.environ)))
        metrics = stack.enter_context(
            MetricsWriter(run.metrics("inference", index=allocation.index))
        )
        job = Job(
            run=run,
            allocation=allocation,
            stop=stop,
            gateway=gateway,
            versions=versions,
            listener=listener,
            metrics=metrics,
            idle_seconds=recipe.buffer.peer_seconds,
        )
        return await job.work(Gate(gateway, token=token, max_body_bytes=MAX_BODY_BYTES))


async def _unless_stopped(opening: Coroutine[Any, Any, T], stop: StopFlag) -> T | None:
    """What was opened; None when the job was asked to stop before."""
    task = asyncio.ensure_future(opening)
    while not task.done() and not stop.stopping:
        await asyncio.wait([task], timeout=POLL_SECONDS)
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait([task])
    return None


def offer_if_published(run: Run, versions: Versions, version: int) -> None:
    """A node may know of a version first, but also of one that a crashed learner lost."""
    if version > versions.version and run.policy(version).is_dir():
        versions.offer(version)


def is_ready(engine: Engine) -> bool:
    """Whether an engine over server processes of its own has one that is up."""
    pool = getattr(engine, "pool", None)
    return pool is None or bool(pool.servers)


@contextmanager
def listening(host: str) -> Iterator[socket.socket]:
    """A socket at a free port of the interface that others reach."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        listener.listen(2048)
        yield listener


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to the job."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Job:
    """The loop of one inference job."""

    def __init__(
        self,
        *,
        run: Run,
        allocation: Allocation,
        stop: StopFlag,
        gateway: Gateway,
        versions: Versions,
        listener: socket.socket,
        metrics: MetricsWriter,
        idle_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._allocation = allocation
        self._stop = stop
        self._gateway = gateway
        self._versions = versions
        self._metrics = metrics
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._listener = listener
        self._herald = Herald(run, allocation, identity=gateway.identity, at=listener.getsockname())
        self._asked = (clock(), 0)
        self._behind_since: float | None = None
        self._learner = LearnerWatch(run, clock=clock)
        self._reported = (clock(), 0, 0)
        self._progress = _progress_before(allocation)
        self._loaded = {versions.version}

    async def work(self, app: Gate) -> End:
        """Serves until an end, then drains."""
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=120,
            timeout_graceful_shutdown=1,
        )
        server = _Server(config)
        tasks = [
            asyncio.create_task(server.serve(sockets=[self._listener]), name="http"),
            asyncio.create_task(self._versions.follow(), name="versions"),
        ]
        log.info("inference job %d listens at %s", self._allocation.index, self._herald.place)
        try:
            end = await self._until_an_end(tasks)
            self._herald.withdraw()
            log.info("takes nothing more: %s", end.reason)
            if not self._gateway.dead:
                await self._drain(end)
            return end
        finally:
            self._herald.withdraw()
            server.should_exit = True
            tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._report(self._gateway.trouble)

    async def _until_an_end(self, tasks: list["asyncio.Task[None]"]) -> End:
        while True:
            newest = await asyncio.to_thread(self._newest)
            if newest is not None:
                self._versions.offer(newest)
            trouble = self._gateway.trouble
            end = await asyncio.to_thread(self._round, newest, trouble)
            if end is not None:
                return end
            done, _ = await asyncio.wait(
                tasks, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()  # raises what ended it
                return End(reason=f"{task.get_name()} ended")

    def _newest(self) -> int | None:
        try:
            return latest_version(self._run)
        except PolicyError as err:
            log.warning("%s", err)
            return None

    def _round(self, newest: int | None, trouble: str) -> End | None:
        """Announcement, metrics, and whether there is a reason to end; waits for files."""
        self._herald.tell(
            trouble, version=self._versions.version, in_flight=self._gateway.in_flight
        )
        if self._clock() - self._reported[0] >= METRICS_SECONDS:
            self._report(trouble)
        return self._end(newest)

    def _end(self, newest: int | None) -> End | None:
        gateway = self._gateway
        if reason := self._stop.reason:
            return End(reason=reason)
        if self._herald.fenced:
            return End(reason="a newer attempt of this job serves in its place")
        if gateway.dead:
            return End(reason=gateway.dead)
        if over := self._learner():
            return End(reason=over.reason, finished=True)
        return self._behind(newest) or self._idle()

    def _behind(self, newest: int | None) -> End | None:
        """A server that can't follow must not stay behind silently."""
        error = self._versions.last_error
        if not error or newest is None or newest <= self._versions.version:
            self._behind_since = None
            return None
        now = self._clock()
        if self._behind_since is None:
            self._behind_since = now
        if now - self._behind_since < BEHIND_SECONDS:
            return None
        return End(reason=f"version {newest} can't be loaded: {error}")

    def _idle(self) -> End | None:
        now, gateway = self._clock(), self._gateway
        count = gateway.num_completed + gateway.num_failed
        if count != self._asked[1] or gateway.in_flight:
            self._asked = (now, count)
        if now - self._asked[0] < self._idle_seconds:
            return None
        who = endpoints.culprit(self._run, "rollout")
        return End(reason=f"nobody asked anything for {self._idle_seconds:g} s; rollout: {who}")

    async def _drain(self, end: End) -> None:
        """Lets what is in flight end, as long as there is time."""
        self._gateway.draining = True
        grace = float(self._allocation.grace_seconds)
        seconds = (
            0.8 * grace if "walltime" in end.reason else min(TERMINATE_DRAIN_SECONDS, grace / 2)
        )
        until = self._clock() + (0.0 if end.finished else seconds)
        while self._gateway.in_flight and self._clock() < until:
            await asyncio.sleep(POLL_SECONDS / 5)
        if self._gateway.in_flight:
            log.warning("%d requests go elsewhere", self._gateway.in_flight)

    def _report(self, trouble: str) -> None:
        """A row of totals and rates, and the progress that keeps the chain going."""
        gateway, now = self._gateway, self._clock()
        seconds = max(now - self._reported[0], 1e-6)
        version = self._versions.version
        self._loaded.add(version)
        try:
            self._metrics.write(
                attempt=self._allocation.attempt,
                version=version,
                in_flight=gateway.in_flight,
                completed=gateway.num_completed,
                failed=gateway.num_failed,
                requests_per_second=(gateway.num_completed - self._reported[1]) / seconds,
                tokens_per_second=(gateway.num_tokens - self._reported[2]) / seconds,
                note=trouble or self._versions.last_error,
            )
            done = gateway.num_completed + len(self._loaded) - 1
            self._allocation.record_progress(self._progress + done)
        except OSError as err:  # a full disk must not end the server
            log.warning("metrics can't be written: %s", err)
        self._reported = (now, gateway.num_completed, gateway.num_tokens)


def _progress_before(allocation: Allocation) -> float:
    path = allocation.run.progress(allocation.role, index=allocation.index)
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return 0.0
