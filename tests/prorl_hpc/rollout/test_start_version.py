"""A node that starts while the learner publishes: the version it began with may be gone."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prorl_hpc.policy import PolicyError, publish_policy, read_manifest
from prorl_hpc.rollout import node
from prorl_hpc.run import Run

RECIPE: Any = None


class Engine:
    def __init__(self, version: int) -> None:
        self.version = version
        self.closed = False

    async def start(self) -> None:
        return

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    run = Run(tmp_path / "run")
    publish_policy(run, version=7, step=7, write=lambda d: (d / "w").write_bytes(b"w") and None)
    monkeypatch.setattr(node, "make_engine", lambda recipe, path, version: Engine(version))
    return run


async def _started(run: Run, version: int) -> Engine:
    async with node.engine_at(RECIPE, run, version) as (engine, digest):
        assert digest == read_manifest(run.policy(7)).digest
        return engine


def test_a_removed_version_is_replaced_by_the_newest(run: Run) -> None:
    engine = asyncio.run(_started(run, 3))
    assert engine.version == 7
    assert engine.closed


def test_a_damaged_version_is_no_reason_to_take_another(run: Run) -> None:
    (run.policy(7) / "w").write_bytes(b"x")
    with pytest.raises(PolicyError):
        asyncio.run(_started(run, 7))


def test_sandboxes_of_all_attempts_share_one_place(tmp_path: Path) -> None:
    places = {
        node.environments_directory(SimpleNamespace(scratch=tmp_path / "prorl-1" / key / attempt))
        for key, attempt in (("a-rollout-0", "1"), ("a-rollout-0", "2"), ("b-rollout-3", "1"))
    }
    assert places == {tmp_path / "prorl-1" / "environments"}


def test_a_stop_ends_the_wait_for_the_buffer() -> None:
    stop: Any = SimpleNamespace(stopping=True, reason="got SIGTERM")
    with pytest.raises(node.PeerMissing, match="got SIGTERM"):
        asyncio.run(node.unless_stopped(asyncio.Event().wait(), stop))
