"""A learner that crashed trains a version again: nodes must not go on with the lost weights.

The engine is scripted and notes which weights it was given; manifests and directories are real.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from prorl_hpc.inference.engine import EngineError
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.policy import digest_at, discard_newer, publish_policy
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.run import Run
from tests.prorl_hpc.rollout.helpers import make_tokenizer

BOUND_SECONDS = 300.0


class Loader(ScriptedEngine):
    """Notes the weights of each version that it loads."""

    def __init__(self, *, version: int) -> None:
        super().__init__(make_tokenizer(), [], version=version)
        self.loaded: list[tuple[int, str]] = []

    async def load(self, version: int, *, path: Path) -> None:
        self.loaded.append((version, (path / "w").read_text()))
        await super().load(version, path=path)


def put(run: Run, version: int, weights: str) -> None:
    def write(directory: Path) -> None:
        (directory / "w").write_text(weights)

    publish_policy(run, version=version, step=version, write=write)


def following(
    run: Run, body: Callable[[Loader, Versions], Awaitable[None]], *, version: int
) -> Loader:
    async def main() -> Loader:
        engine = Loader(version=version)
        digest = digest_at(run.policy(version))
        versions = Versions(engine, run=run, digest=digest, publish_seconds=60.0, look_seconds=0.0)
        follow = asyncio.create_task(versions.follow())
        try:
            await asyncio.wait_for(body(engine, versions), BOUND_SECONDS)
        finally:
            follow.cancel()
        return engine

    return asyncio.run(main())


async def told(versions: Versions, version: int, condition: Callable[[], bool]) -> None:
    """Heartbeats say `version` until something is seen to happen."""
    while not condition():
        versions.offer(version)
        await asyncio.sleep(0.01)


def test_a_version_trained_again_is_loaded_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    put(run, 5, "before the crash")

    async def body(engine: Loader, versions: Versions) -> None:
        for _ in range(3):
            versions.offer(5)
            await asyncio.sleep(0.01)
        assert not engine.loaded
        put(run, 5, "after the crash")
        await told(versions, 5, lambda: bool(engine.loaded))
        for _ in range(3):
            versions.offer(5)
            await asyncio.sleep(0.01)

    assert following(run, body, version=5).loaded == [(5, "after the crash")]


def test_the_same_bytes_published_again_are_not_loaded_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    put(run, 5, "same")

    async def body(engine: Loader, versions: Versions) -> None:
        discard_newer(run, 4)
        versions.offer(5)
        await asyncio.sleep(0.02)
        put(run, 5, "same")
        put(run, 6, "next")
        versions.offer(5)
        await asyncio.sleep(0.02)
        await told(versions, 6, lambda: engine.version == 6)

    assert following(run, body, version=5).loaded == [(6, "next")]


def test_a_node_goes_back_with_a_learner_that_resumed_at_an_older_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for version in (3, 4, 5):
        put(run, version, f"first {version}")

    async def body(engine: Loader, versions: Versions) -> None:
        versions.offer(3)  # a buffer that restarted and hasn't heard of 5 yet
        await asyncio.sleep(0.05)
        assert not engine.loaded
        discard_newer(run, 3)
        await told(versions, 3, lambda: engine.version == 3)
        put(run, 4, "second 4")
        await told(versions, 4, lambda: engine.version == 4)

    loaded = following(run, body, version=5).loaded
    assert loaded == [(3, "first 3"), (4, "second 4")]


def test_bound_rollouts_of_lost_weights_fail_and_later_ones_get_the_new(tmp_path: Path) -> None:
    run = Run(tmp_path)
    put(run, 5, "lost")

    async def body(engine: Loader, versions: Versions) -> None:
        second_in = asyncio.Event()

        async def second() -> None:
            async with versions.held(5):
                second_in.set()
                assert engine.loaded == [(5, "kept")]

        for _ in range(2):
            versions.bind(5)
        with pytest.raises(EngineError, match="version 5 was published again"):
            async with versions.held(5):
                put(run, 5, "kept")
                late = asyncio.create_task(second())
                # Enters only when nobody works with the lost weights any more.
                await asyncio.sleep(0.05)
                assert not second_in.is_set()
        versions.unbind(5)
        await late
        versions.unbind(5)

    following(run, body, version=5)


def test_a_removed_directory_alone_is_no_reason_to_fail_a_rollout(tmp_path: Path) -> None:
    run = Run(tmp_path)
    put(run, 5, "held")

    async def body(engine: Loader, versions: Versions) -> None:
        versions.bind(5)
        async with versions.held(5):
            shutil.rmtree(run.policy(5))
        versions.unbind(5)

    assert following(run, body, version=5).loaded == []
