"""What serves the policy to a rollout node: an engine of its own, or the run's inference jobs.

Knows both placements and what they mean for versions and time limits; serves nothing itself.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from hpc.allocation import StopFlag
from hpc.errors import EndpointTimeout
from prorl_hpc.choices import InferencePlacement
from prorl_hpc.inference.announce import load_token
from prorl_hpc.inference.engine import EngineError
from prorl_hpc.inference.http_pool import HttpPool
from prorl_hpc.inference.served import ServedEngine, ServedOptions
from prorl_hpc.policy import digest_at
from prorl_hpc.recipe import Recipe
from prorl_hpc.rollout.limits import TimeLimits
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.run import Run

POLL_SECONDS = 0.1
NOTE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """An engine, and what goes with it."""

    engine: Any
    versions: Versions
    limits: TimeLimits = field(default_factory=TimeLimits)
    missing: Callable[[], str] = lambda: ""
    """Why the node can't go on; empty while it can."""
    metrics: Callable[[], dict[str, object]] = dict


class ServedVersions(Versions):
    """Versions of servers that follow by themselves: a request says which one it is bound to."""

    def __init__(self, engine: ServedEngine, *, run: Run) -> None:
        super().__init__(engine, run=run)
        self._served = engine

    def offer(self, version: int) -> None:
        self._served.hint(version)

    def bind(self, version: int | None) -> None:
        """Nothing to hold: the servers do, while they have the request."""

    def unbind(self, version: int | None) -> None:
        """See `bind`."""

    @asynccontextmanager
    async def held(self, version: int | None) -> AsyncIterator[None]:
        """Raises EngineError at the end if the number was published again with other weights."""
        if version is None:
            yield
            return
        path = self._run.policy(version)
        before = await asyncio.to_thread(digest_at, path)
        yield
        after = await asyncio.to_thread(digest_at, path)
        if before and after and before != after:
            raise EngineError(
                f"policy version {version} was published again with other weights while this "
                "rollout ran; it is to be sampled again"
            )

    async def follow(self) -> None:
        """Keeps the note for people; runs until cancelled."""
        while True:
            self.last_error = self._served.note
            await asyncio.sleep(NOTE_SECONDS)


def is_served(recipe: Recipe) -> bool:
    """Whether the run has inference jobs."""
    return recipe.inference.placement is InferencePlacement.own_jobs


def open_own(stack: AsyncExitStack, engine: Any, versions: Versions) -> Serving:
    """The node's own engine; while none of its server processes is up, time limits stand still."""
    limits = TimeLimits()
    pool = getattr(engine, "pool", None)
    if pool is not None:
        watching = asyncio.create_task(_pause_without_servers(pool, limits), name="limits")
        stack.push_async_callback(_end, watching)
    return Serving(engine=engine, versions=versions, limits=limits)


async def _pause_without_servers(pool: HttpPool, limits: TimeLimits) -> None:
    try:
        while True:
            if pool.servers:
                limits.resume()
            else:
                limits.pause()
            await asyncio.sleep(POLL_SECONDS)
    finally:
        limits.resume()


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def open_served(
    stack: AsyncExitStack, run: Run, recipe: Recipe, *, version: int, stop: StopFlag
) -> Serving:
    """The inference jobs' servers as an engine, once one of them is there.

    Raises EndpointTimeout naming who is missing, and TokenError for a run without a token.
    """
    limits = TimeLimits()
    engine = ServedEngine(
        run,
        token=load_token(run),
        version=version,
        limits=limits,
        options=ServedOptions(
            request_seconds=recipe.rollout.engine.request_seconds,
            missing_seconds=recipe.buffer.peer_seconds,
            num_clients=recipe.rollout.nodes,
        ),
    )
    stack.push_async_callback(engine.close)
    await engine.start()
    while not engine.pool.servers:
        if missing := engine.missing or stop.reason:
            raise EndpointTimeout(f"no inference server has joined: {missing}")
        await asyncio.sleep(POLL_SECONDS)
    pool = engine.pool
    return Serving(
        engine=engine,
        versions=ServedVersions(engine, run=run),
        limits=limits,
        missing=lambda: engine.missing,
        metrics=lambda: {
            "servers": len(pool.servers),
            "servers_lost": pool.num_lost,
            "server_retries": pool.num_retries,
        },
    )
