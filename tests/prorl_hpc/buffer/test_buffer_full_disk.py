"""A full disk under the buffer: nothing is acked, and it goes on by itself when there is room."""

import asyncio
import errno
import os
from pathlib import Path

import pytest

from prorl_hpc.buffer import store
from prorl_hpc.buffer.manifest import Shard, valid_lines
from prorl_hpc.buffer.reader import GroupReader
from tests.prorl_hpc.buffer.buffer_helpers import (
    DEADLINE_SECONDS,
    make_run,
    make_trajectory,
    produce,
    serving,
)
from tests.prorl_hpc.disks import fill_disk, small_disk


def test_a_full_disk_pauses_the_run_and_acks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "RETRY_SECONDS", 0.05)
    full = True
    write = os.writev

    def write_or_fail(descriptor: int, parts: list[memoryview]) -> int:
        # Only shards are written in pieces.
        if full:
            write(descriptor, [bytes(parts[0])[:100]])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, parts)

    run = make_run(tmp_path / "run")
    with serving(run) as buffer:
        learner = buffer.learner()

        async def node() -> None:
            nonlocal full
            client = await buffer.rollout()
            lease = (await client.lease(4)).leases[0]
            monkeypatch.setattr(os, "writev", write_or_fail)
            push = asyncio.create_task(client.push(produce(lease)))
            paused = buffer.server.service.store
            while "No space left" not in paused.paused:
                await asyncio.sleep(0.01)
            assert (await client.lease(4)).leases == ()
            second = asyncio.create_task(client.push([make_trajectory(1, 0)]))
            while not client.busy:
                await asyncio.sleep(0.01)
            assert "make room" in client.busy
            assert "No space left" in (await asyncio.to_thread(learner.status)).note
            assert not push.done()
            assert [p.name for p in run.shards.iterdir() if p.suffix == ".h5"] == []
            full = False
            assert set((await push).values()) == {"stored"}
            assert set((await second).values()) == {"stored"}
            await client.close()

        asyncio.run(asyncio.wait_for(node(), DEADLINE_SECONDS))
        ref = learner.take(1, timeout_seconds=DEADLINE_SECONDS)[0]
        assert len(GroupReader(run).read(ref).trajectories) == 4
        assert learner.status().note == ""
        learner.close()


def test_a_disk_that_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled by somebody else while nodes push, and freed later."""
    monkeypatch.setattr(store, "RETRY_SECONDS", 0.05)
    with small_disk(tmp_path / "disk", mib=4) as disk:
        run = make_run(disk / "run")
        ballast = disk / "ballast"
        with serving(run) as buffer:
            learner = buffer.learner()

            async def node() -> None:
                client = await buffer.rollout()
                leases = (await client.lease(8)).leases
                await client.push(produce(leases[0]))
                fill_disk(ballast, spare_bytes=0)
                push = asyncio.create_task(client.push(produce(leases[1])))
                while "No space left" not in buffer.server.service.store.paused:
                    await asyncio.sleep(0.01)
                assert not push.done()
                lines = list(valid_lines(run.manifest))
                assert sum(len(line.rows) for line in lines if isinstance(line, Shard)) == 4
                ballast.unlink()
                assert set((await push).values()) == {"stored"}
                await client.close()

            asyncio.run(asyncio.wait_for(node(), DEADLINE_SECONDS))
            refs = learner.take(2, timeout_seconds=DEADLINE_SECONDS)
            reader = GroupReader(run)
            assert [len(reader.read(ref).trajectories) for ref in refs] == [4, 4]
            reader.close()
            learner.close()
