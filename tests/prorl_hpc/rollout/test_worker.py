"""A rollout node's loops against a buffer in memory."""

import asyncio
from collections import deque

import pytest

from prorl_hpc.buffer.messages import BufferGone, HeartbeatReply, LeaseReply
from prorl_hpc.inference.engine import EngineError
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.records import Outcome
from prorl_hpc.rollout.health import Health
from prorl_hpc.rollout.spool import Spool
from prorl_hpc.rollout.worker import Terms, Worker
from prorl_hpc.run import Run
from tests.prorl_hpc.rollout.helpers import make_lease, make_pipeline, make_tokenizer

DEADLINE_SECONDS = 300


class MemoryBuffer:
    """Hands out the given leases, takes everything, says `finished` when told to."""

    def __init__(self, leases=(), *, finish_after=None):
        self.leases = deque(leases)
        self.stored = {}
        self.heartbeats = []
        self.phase = "running"
        self.latest = 0
        self.revoked = ()
        self.finish_after = finish_after
        self.result = "stored"
        self.gone = False

    async def lease(self, capacity):
        if self.gone:
            raise BufferGone("no answer for 1 s")
        granted = (self.leases.popleft(),) if self.leases else ()
        return LeaseReply(
            leases=granted, latest_version=self.latest, phase=self.phase, retry_seconds=0.01
        )

    async def heartbeat(self, lease_ids):
        self.heartbeats.append(tuple(lease_ids))
        revoked, self.revoked = self.revoked, ()
        return HeartbeatReply(revoked=revoked, latest_version=self.latest, phase=self.phase)

    async def push(self, trajectories):
        for trajectory in trajectories:
            self.stored[trajectory.key] = trajectory
        if self.finish_after is not None and len(self.stored) >= self.finish_after:
            self.phase = "finished"
        return {t.key: self.result for t in trajectories}


def make_worker(
    tmp_path, client, *, engine=None, stop=lambda: "", capacity=8, spool=None, over=lambda: ""
):
    engine = engine or ScriptedEngine(make_tokenizer(), lambda prompt, affinity: "3")
    pipeline = make_pipeline(engine, run=Run(tmp_path))

    async def nap(seconds):
        await asyncio.sleep(0.01)

    return Worker(
        client=client,
        pipeline=pipeline,
        versions=pipeline._parts.versions,
        spool=spool or Spool(tmp_path / "spool", limit_bytes=1 << 20),
        health=Health(max_failures=4, max_probes=2),
        terms=Terms(capacity=capacity, heartbeat_seconds=1.0, farewell_seconds=10.0),
        stop_reason=stop,
        run_over=over,
        sleep=nap,
    )


def run_worker(tmp_path, client, **options):
    async def main():
        worker = make_worker(tmp_path, client, **options)
        return worker, await asyncio.wait_for(worker.run(), DEADLINE_SECONDS)

    return asyncio.run(main())


def test_leases_become_pushed_groups_until_the_run_is_finished(tmp_path):
    leases = [make_lease(lease_id=i, group_id=i) for i in range(1, 4)]
    client = MemoryBuffer(leases, finish_after=12)
    worker, end = run_worker(tmp_path, client)
    assert end.finished
    assert set(client.stored) == {(g, r) for g in (1, 2, 3) for r in range(4)}
    assert worker.counters.stored == 12
    assert worker.spool.num_bytes == 0


def test_only_the_missing_rollouts_of_a_group_are_made(tmp_path):
    client = MemoryBuffer([make_lease(rollouts=(1, 3))], finish_after=2)
    run_worker(tmp_path, client)
    assert set(client.stored) == {(7, 1), (7, 3)}


def test_asked_to_stop_it_hands_in_what_is_done_and_gives_leases_back(tmp_path):
    class OneAnswer(ScriptedEngine):
        async def generate(self, prompt_ids, *, sampling, affinity=""):
            if affinity != "7-0":
                await asyncio.Event().wait()
            return await super().generate(prompt_ids, sampling=sampling, affinity=affinity)

    client = MemoryBuffer([make_lease()])
    engine = OneAnswer(make_tokenizer(), lambda prompt, affinity: "3")
    worker, end = run_worker(
        tmp_path, client, engine=engine, stop=lambda: "walltime" if client.stored else ""
    )
    assert (end.finished, end.reason) == (False, "walltime")
    assert set(client.stored) == {(7, 0)}
    assert client.heartbeats[-1] == ()
    assert worker.in_flight == 0


def test_a_revoked_lease_is_dropped(tmp_path):
    class Never(ScriptedEngine):
        async def generate(self, prompt_ids, *, sampling, affinity=""):
            client.revoked = (1,)
            if client.heartbeats and not worker_box[0].in_flight:
                client.phase = "finished"
            await asyncio.Event().wait()

    worker_box = []
    client = MemoryBuffer([make_lease()])

    async def main():
        worker = make_worker(tmp_path, client, engine=Never(make_tokenizer(), []))
        worker_box.append(worker)
        task = asyncio.create_task(worker.run())
        while not client.heartbeats or worker.in_flight:
            await asyncio.sleep(0.01)
        client.phase = "finished"
        return await task

    assert asyncio.run(asyncio.wait_for(main(), DEADLINE_SECONDS)).finished
    assert client.stored == {}


def test_heartbeats_go_on_while_a_revoked_rollout_closes_what_it_has_open(tmp_path):
    class SlowToLeave(ScriptedEngine):
        async def generate(self, prompt_ids, *, sampling, affinity=""):
            client.revoked = (1,)
            try:
                await asyncio.Event().wait()
            finally:
                leaving.append(affinity)
                await closed.wait()

    client = MemoryBuffer([make_lease()])
    leaving, closed = [], asyncio.Event()

    async def main():
        worker = make_worker(tmp_path, client, engine=SlowToLeave(make_tokenizer(), []))
        task = asyncio.create_task(worker.run())
        while len(leaving) < 4:
            await asyncio.sleep(0.01)
        before = len(client.heartbeats)
        while len(client.heartbeats) < before + 3:
            await asyncio.sleep(0.01)
        assert worker.in_flight == 4  # they still take the node's places
        closed.set()
        while worker.in_flight:
            await asyncio.sleep(0.01)
        client.phase = "finished"
        return await task

    assert asyncio.run(asyncio.wait_for(main(), DEADLINE_SECONDS)).finished


@pytest.mark.parametrize("result", ["late", "duplicate", "retry"])
def test_whatever_the_buffer_says_the_copy_is_forgotten(tmp_path, result):
    client = MemoryBuffer([make_lease()], finish_after=4)
    client.result = result
    worker, _ = run_worker(tmp_path, client)
    assert worker.spool.num_bytes == 0
    assert worker.counters.results == {result: 4}


def test_a_fenced_node_ends(tmp_path):
    client = MemoryBuffer([make_lease()])
    client.result = "fenced"
    _, end = run_worker(tmp_path, client)
    assert not end.finished
    assert "newer attempt" in end.reason


def test_a_buffer_that_is_gone_ends_the_attempt_with_the_reason(tmp_path):
    client = MemoryBuffer()
    client.gone = True
    _, end = run_worker(tmp_path, client)
    assert (end.finished, end.reason) == (False, "no answer for 1 s")


class Broken(ScriptedEngine):
    def __init__(self, *, mended_after):
        super().__init__(make_tokenizer(), lambda prompt, affinity: "3")
        self.calls = 0
        self._mended_after = mended_after

    async def generate(self, prompt_ids, *, sampling, affinity=""):
        self.calls += 1
        if self.calls <= self._mended_after:
            raise EngineError("the device is lost")
        return await super().generate(prompt_ids, sampling=sampling, affinity=affinity)


def test_a_node_that_fails_at_everything_probes_and_ends(tmp_path):
    client = MemoryBuffer([make_lease(lease_id=i, group_id=i) for i in range(1, 100)])
    _, end = run_worker(tmp_path, client, engine=Broken(mended_after=10_000))
    assert not end.finished
    assert "fails at everything" in end.reason
    assert "the device is lost" in end.reason
    assert client.leases  # it stopped drawing work
    assert all(t.outcome is Outcome.infrastructure_failure for t in client.stored.values())


def test_a_node_that_recovers_goes_on(tmp_path):
    client = MemoryBuffer([make_lease(lease_id=i, group_id=i) for i in (1, 2)], finish_after=8)
    _, end = run_worker(tmp_path, client, engine=Broken(mended_after=5), capacity=4)
    assert end.finished
    assert len(client.stored) == 8


def test_what_an_earlier_attempt_left_is_handed_in_first(tmp_path):
    class Unreachable(MemoryBuffer):
        async def push(self, trajectories):
            raise BufferGone("no answer")

    run_worker(tmp_path, Unreachable([make_lease()]))
    left = Spool(tmp_path / "spool", limit_bytes=1 << 20)
    assert left.recover()
    client = MemoryBuffer(finish_after=1)
    _, end = run_worker(tmp_path, client)
    assert end.finished
    assert client.stored
    assert not list((tmp_path / "spool").glob("*"))


def test_a_node_that_the_buffer_left_without_a_word_hears_it_from_the_ledger(tmp_path):
    class LeftBuffer(MemoryBuffer):
        async def lease(self, capacity):
            await asyncio.Event().wait()

    _, end = run_worker(tmp_path, LeftBuffer(), over=lambda: "the run is finished")
    assert end.finished
    assert end.reason == "the run is finished"
