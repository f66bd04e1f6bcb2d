"""Who keeps a run from going on: named by the watchdog; and what holds back too much."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from prorl_hpc.buffer.client import Credit
from prorl_hpc.buffer.server import Ended, ServerConfig
from prorl_hpc.buffer.watch import Watch
from tests.prorl_hpc.buffer.buffer_helpers import (
    DEADLINE_SECONDS,
    make_config,
    make_run,
    make_trajectory,
    produce,
    serving,
    wait_for,
)


def test_each_culprit_by_hand() -> None:
    watch = Watch(peer_seconds=60.0, stall_seconds=100.0, started=0.0)
    assert watch.culprit(60.0) == ""
    assert watch.culprit(61.0).startswith("no learner ever came: silent for 61 s, ")
    watch.learner_heard = 50.0
    assert watch.culprit(61.0).startswith("no rollout node ever came: silent for 61 s, ")
    watch.rollout_heard = 70.0
    assert watch.culprit(99.0) == ""
    assert watch.culprit(111.0).startswith("no learner is left: silent for 61 s, ")
    watch.learner_heard = 200.0
    assert watch.culprit(200.0).startswith("no rollout node is left: silent for 130 s, ")
    watch.rollout_heard = 200.0
    assert "sent no trajectory for 200 s" in watch.culprit(200.0)
    assert "an engine or environment hangs" in watch.culprit(200.0)
    watch.progressed = 150.0
    assert watch.culprit(200.0) == ""


def test_nodes_that_hold_leases_and_send_nothing_end_the_attempt(tmp_path: Path) -> None:
    """A node whose engine hangs goes on heartbeating."""
    server = ServerConfig(seal_seconds=0.02, stall_seconds=1.0, goodbye_seconds=0.1)
    config = make_config(lease_seconds=600.0)
    with serving(make_run(tmp_path / "run"), config=config, server=server) as buffer:
        learner = buffer.learner()

        async def node() -> None:
            client = await buffer.rollout()
            held = [lease.lease_id for lease in (await client.lease(4)).leases]
            assert held
            while (await client.heartbeat(held)).phase == "running":
                await asyncio.sleep(0.01)
            await client.close()

        asyncio.run(asyncio.wait_for(node(), DEADLINE_SECONDS))
        buffer.join()
        learner.close()
        assert isinstance(buffer.ended, Ended)
        assert buffer.ended.culprit
        assert "hold leases but sent no trajectory" in buffer.ended.reason


def test_pushes_are_held_back_while_the_disk_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By bytes on their way to the disk; what was held back comes through later, unasked."""
    behind = threading.Event()
    write = os.writev

    def slow(descriptor: int, parts: list[memoryview]) -> int:
        assert behind.wait(DEADLINE_SECONDS)
        return write(descriptor, parts)

    server = ServerConfig(seal_seconds=0.02, max_pending_bytes=1, goodbye_seconds=0.1)
    with serving(make_run(tmp_path / "run"), server=server) as buffer:
        learner = buffer.learner()

        async def node() -> None:
            client = await buffer.rollout()
            lease = (await client.lease(4)).leases[0]
            monkeypatch.setattr(os, "writev", slow)
            first = asyncio.create_task(client.push(produce(lease)))
            store = buffer.server.service.store
            await asyncio.to_thread(wait_for, lambda: store.pending_bytes > 0, what="the push")
            second = asyncio.create_task(client.push([make_trajectory(1, 0)]))
            while client.busy != "the disk is behind":
                await asyncio.sleep(0.01)
            assert not first.done()
            behind.set()
            assert set((await first).values()) == {"stored"}
            assert set((await second).values()) == {"stored"}
            assert client.busy == ""
            await client.close()

        try:
            asyncio.run(asyncio.wait_for(node(), DEADLINE_SECONDS))
        finally:
            behind.set()
        assert learner.status().counters["back_pressure"] >= 1
        assert learner.status().trajectories == 5
        learner.close()


def test_a_node_has_only_so_many_bytes_on_the_wire() -> None:
    async def scenario() -> None:
        credit = Credit(100)
        order: list[str] = []

        async def send(name: str, num_bytes: int, done: asyncio.Event) -> None:
            async with credit.take(num_bytes):
                order.append(name)
                await done.wait()

        free, wait = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(send("a", 60, free)), asyncio.create_task(send("b", 60, wait))]
        tasks.append(asyncio.create_task(send("c", 40, wait)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert order == ["a", "c"]  # 60 + 60 is more than 100, 60 + 40 isn't
        free.set()
        await tasks[0]
        for _ in range(10):
            await asyncio.sleep(0)
        assert order == ["a", "c", "b"]
        wait.set()
        await asyncio.gather(*tasks)
        async with credit.take(1000):  # alone, whatever its size
            pass

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_SECONDS))
