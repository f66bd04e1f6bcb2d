"""Spool, health, versions and verifiers, each alone."""

import asyncio
import struct

import msgspec
import numpy as np
import pytest

from prorl_hpc.inference.engine import EngineError
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind, Outcome
from prorl_hpc.rollout.health import Health, State
from prorl_hpc.rollout.scoring import VerifierPool, VerifierTimeout
from prorl_hpc.rollout.spool import Spool
from prorl_hpc.rollout.verifier import Request
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.run import Run
from prorl_hpc.tasks.base import VerifierError
from tests.prorl_hpc.buffer.buffer_helpers import make_trajectory
from tests.prorl_hpc.rollout.helpers import SUMS, make_tokenizer


def equal(one, two):
    return one.key == two.key and all(
        np.array_equal(getattr(one, name), getattr(two, name))
        for name in ("tokens", "loss_mask", "logprobs", "versions")
    )


def test_a_spooled_trajectory_comes_back_whole(tmp_path):
    spool = Spool(tmp_path / "spool", limit_bytes=1 << 20)
    kept = [make_trajectory(1, r) for r in range(3)]
    assert all(spool.put(t) for t in kept)
    spool.remove((1, 1))
    again = Spool(tmp_path / "spool", limit_bytes=1 << 20)
    found = again.recover()
    assert [t.key for t in found] == [(1, 0), (1, 2)]
    assert equal(found[0], kept[0])
    assert found[0].reward == kept[0].reward


def test_what_an_earlier_version_spooled_comes_back(tmp_path):
    kept = [make_trajectory(1, r, num_tokens=4 + r) for r in range(2)]
    names = ("group_id", "rollout_index", "kind", "task", "instance_id", "length", "reward",
             "components", "outcome", "finish_reason", "timings", "isolation", "worker", "attempt",
             "detail")  # fmt: skip
    rows = [[len(t.tokens) if n == "length" else getattr(t, n) for n in names] for t in kept]
    head = msgspec.msgpack.encode({"type": "Push", "rows": rows})
    arrays = [
        np.concatenate([getattr(t, name) for t in kept]).tobytes()
        for name in ("tokens", "logprobs", "loss_mask", "versions")
    ]
    lengths = struct.pack("<5Q", *(len(part) for part in (head, *arrays)))
    path = tmp_path / "1-0.trajectory"
    path.write_bytes(b"".join([b"PRLSPL1\n", lengths, head, *arrays]))
    found = Spool(tmp_path, limit_bytes=1 << 20).recover()
    assert len(found) == 2
    for one, two in zip(found, kept, strict=True):
        assert equal(one, two)
        assert (one.reward, one.kind, one.timings) == (two.reward, two.kind, two.timings)
    path.write_bytes(path.read_bytes()[:-3])
    assert Spool(tmp_path, limit_bytes=1 << 20).recover() == []


def test_damaged_spool_files_are_dropped(tmp_path):
    spool = Spool(tmp_path, limit_bytes=1 << 20)
    for rollout in range(3):
        spool.put(make_trajectory(1, rollout))
    files = sorted(tmp_path.glob("*.trajectory"))
    files[0].write_bytes(files[0].read_bytes()[:-3])
    files[1].write_bytes(b"something else")
    assert [t.key for t in Spool(tmp_path, limit_bytes=1 << 20).recover()] == [(1, 2)]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_or_absent_spool_keeps_nothing(tmp_path):
    assert not Spool(tmp_path, limit_bytes=10).put(make_trajectory(1, 0))
    assert not Spool(None, limit_bytes=1 << 20).put(make_trajectory(1, 0))
    blocked = tmp_path / "file"
    blocked.write_text("")
    spool = Spool(blocked / "spool", limit_bytes=1 << 20)
    assert not spool.put(make_trajectory(1, 0))
    assert spool.recover() == []


def test_health_turns_on_failures_in_a_row_only():
    health = Health(max_failures=3, max_probes=2)
    for outcome in (Outcome.infrastructure_failure, Outcome.scored) * 5:
        health.record(outcome)
    assert health.state is State.well
    for _ in range(3):
        health.record(Outcome.infrastructure_failure, detail="no GPU")
    assert health.state is State.suspect
    assert "no GPU" in health.note
    health.probed(Outcome.invalid)
    assert health.state is State.well
    for _ in range(3):
        health.record(Outcome.infrastructure_failure)
    for _ in range(2):
        health.probed(Outcome.infrastructure_failure)
    assert health.state is State.sick


class Loader(ScriptedEngine):
    def __init__(self):
        super().__init__(make_tokenizer(), [])
        self.loaded = []

    async def load(self, version, *, path):
        self.loaded.append(version)
        await super().load(version, path=path)


def with_versions(tmp_path, body, *, published=(0, 1, 2)):
    run = Run(tmp_path)
    for version in published:
        run.policy(version).mkdir(parents=True)

    async def main():
        engine = Loader()
        versions = Versions(engine, run=run, publish_seconds=0.2)
        follow = asyncio.create_task(versions.follow())
        try:
            await asyncio.wait_for(body(engine, versions), 300)
        finally:
            follow.cancel()
        return engine

    return asyncio.run(main())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_a_new_version_is_loaded_at_once_when_nobody_is_bound(tmp_path):
    async def body(engine, versions):
        versions.offer(2)
        versions.offer(1)
        await until(lambda: engine.version == 2)

    assert with_versions(tmp_path, body).loaded == [2]


def test_a_newer_version_waits_for_bound_rollouts(tmp_path):
    async def body(engine, versions):
        versions.bind(1)
        versions.offer(2)
        async with versions.held(1):
            assert engine.version == 1
        versions.unbind(1)
        await until(lambda: engine.version == 2)

    assert with_versions(tmp_path, body).loaded == [1, 2]


def test_two_bound_versions_take_turns_oldest_first(tmp_path):
    order = []

    async def body(engine, versions):
        async def rollout(version):
            async with versions.held(version):
                await asyncio.sleep(0.01)
                assert engine.version == version
                order.append(version)
            versions.unbind(version)

        wanted = [2, 1, 2, 1]
        for version in wanted:
            versions.bind(version)
        await asyncio.gather(*(rollout(version) for version in wanted))

    assert with_versions(tmp_path, body).loaded == [1, 2]
    assert order == [1, 1, 2, 2]


def test_a_version_that_is_gone_fails_its_rollouts_only(tmp_path):
    async def body(engine, versions):
        versions.bind(9)
        with pytest.raises(EngineError, match="version 9"):
            async with versions.held(9):
                pass
        versions.unbind(9)
        versions.bind(1)
        async with versions.held(1):
            assert engine.version == 1

    with_versions(tmp_path, body)


def sums(**options):
    return TaskConfig(kind="logic", options={"family": "chain_sum", "parameters": SUMS} | options)


def request(response, task="sums"):
    return Request(task=task, kind=Kind.train, index=0, response=response)


def with_pool(body, tasks=None):
    async def main():
        pool = VerifierPool(tasks or {"sums": sums()}, seed=0, num_workers=1)
        try:
            return await asyncio.wait_for(body(pool), 500)
        finally:
            await pool.close()

    return asyncio.run(main())


@pytest.mark.process
def test_verifiers_score_hang_die_and_are_replaced():
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("math_verify")
    from prorl_hpc.tasks.registry import make_task

    answer = make_task("sums", sums(), 0).instance(0, kind=Kind.train).answer["entry"]["answer"]

    async def body(pool):
        right = await pool.score(request(answer), timeout_seconds=300)
        assert (right.reward, right.outcome) == (1.0, Outcome.scored)
        with pytest.raises(VerifierTimeout):
            await pool.score(request(answer), timeout_seconds=0.0)
        assert pool.num_replaced == 1
        with pytest.raises(VerifierError, match="isn't in the recipe"):
            await pool.score(request("1", task="other"), timeout_seconds=300)
        (verifier,) = pool._idle
        verifier._process.kill()
        again = await pool.score(request(answer), timeout_seconds=300)
        assert again == right
        assert pool.num_replaced == 2

    with_pool(body)


@pytest.mark.process
def test_verifiers_import_no_torch():
    import subprocess
    import sys

    code = "import sys, prorl_hpc.rollout.verifier; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False"
