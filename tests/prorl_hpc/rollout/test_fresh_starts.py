"""Rollouts that no version binds start with the newest one that their node was told of.

The engine is scripted and its loads are opened by hand; directories are real.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from prorl_hpc.inference.engine import EngineError
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.run import Run
from tests.prorl_hpc.rollout.helpers import make_tokenizer

BOUND_SECONDS = 300.0


class Gate(ScriptedEngine):
    """Loads take until `open` is set; `broken` ones fail."""

    def __init__(self) -> None:
        super().__init__(make_tokenizer(), [])
        self.loading = asyncio.Event()
        self.open = asyncio.Event()
        self.broken = False
        self.one_at_a_time = False
        """Closed again behind each load."""

    async def load(self, version: int, *, path: Path) -> None:
        self.loading.set()
        await self.open.wait()
        if self.broken:
            raise EngineError("the weights can't be read")
        await super().load(version, path=path)
        if self.one_at_a_time:
            self.open.clear()


async def started(versions: Versions, engine: Gate) -> int:
    """The version that a rollout starts with."""
    async with versions.held(None):
        return engine.version


def following(
    tmp_path: Path,
    body: Callable[[Gate, Versions], Awaitable[None]],
    *,
    catch_up_seconds: float = BOUND_SECONDS,
) -> None:
    run = Run(tmp_path)
    for version in range(3):
        run.policy(version).mkdir(parents=True)

    async def main() -> None:
        engine = Gate()
        versions = Versions(engine, run=run, catch_up_seconds=catch_up_seconds)
        follow = asyncio.create_task(versions.follow())
        try:
            await asyncio.wait_for(body(engine, versions), BOUND_SECONDS)
        finally:
            follow.cancel()

    asyncio.run(main())


def test_what_starts_while_a_version_is_loaded_is_made_by_it(tmp_path: Path) -> None:
    async def body(engine: Gate, versions: Versions) -> None:
        assert await started(versions, engine) == 0
        versions.offer(2)
        at_once = asyncio.create_task(started(versions, engine))
        await engine.loading.wait()
        meanwhile = asyncio.create_task(started(versions, engine))
        await asyncio.sleep(0)
        engine.open.set()
        assert await asyncio.gather(at_once, meanwhile) == [2, 2]

    following(tmp_path, body)


def test_a_version_that_cannot_be_loaded_holds_nobody_up(tmp_path: Path) -> None:
    async def body(engine: Gate, versions: Versions) -> None:
        engine.broken = True
        engine.open.set()
        versions.offer(2)
        assert await started(versions, engine) == 0
        assert "can't be read" in versions.last_error
        assert await started(versions, engine) == 0

    following(tmp_path, body)


def test_bound_rollouts_that_keep_the_version_hold_nobody_up(tmp_path: Path) -> None:
    async def body(engine: Gate, versions: Versions) -> None:
        versions.bind(0)
        versions.offer(2)
        assert await started(versions, engine) == 0
        versions.unbind(0)
        waiting = asyncio.create_task(started(versions, engine))
        await engine.loading.wait()
        engine.open.set()
        assert await waiting == 2

    following(tmp_path, body)


def test_a_load_without_end_is_waited_for_with_a_bound(tmp_path: Path) -> None:
    async def body(engine: Gate, versions: Versions) -> None:
        versions.offer(2)
        await engine.loading.wait()
        assert await started(versions, engine) == 0

    following(tmp_path, body, catch_up_seconds=0.05)


def test_a_second_load_in_a_row_has_the_same_bound(tmp_path: Path) -> None:
    async def body(engine: Gate, versions: Versions) -> None:
        engine.one_at_a_time = True
        versions.offer(1)
        await engine.loading.wait()
        waiting = asyncio.create_task(started(versions, engine))
        await asyncio.sleep(0)
        versions.offer(2)
        engine.open.set()
        assert await waiting == 1  # the second load never ends

    following(tmp_path, body, catch_up_seconds=3.0)
