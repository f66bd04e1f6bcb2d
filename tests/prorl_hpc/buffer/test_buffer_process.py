"""The buffer job as a real process: kill -9 while nodes push, clean stop, bad input."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hpc.errors import EXIT_CONTINUE, EXIT_DONE, EXIT_USER
from prorl_hpc.buffer.client import LearnerClient, RolloutClient, locate_buffer
from prorl_hpc.buffer.keys import load_client_keys
from prorl_hpc.buffer.manifest import Closed, Merged, Shard, live_shards, read_lines
from prorl_hpc.buffer.messages import GroupIds, GroupRef
from prorl_hpc.buffer.reader import GroupReader
from prorl_hpc.recipe import AlgorithmConfig, BufferConfig, Recipe, TaskConfig, dump_recipe
from prorl_hpc.run import Run
from tests.prorl_hpc.buffer.buffer_helpers import (
    DEADLINE_SECONDS,
    make_run,
    produce,
    wait_for,
)

pytestmark = pytest.mark.process

NUM_GROUPS = 60


def prepare(path: Path) -> Run:
    run = make_run(path)
    recipe = Recipe(
        name="test",
        steps=10,
        tasks={"sums": TaskConfig(kind="logic", options={"family": "chain_sum"}, train_size=1000)},
        algorithm=AlgorithmConfig(batch_groups=NUM_GROUPS, num_rollouts=4, max_staleness=0),
        buffer=BufferConfig(seal_seconds=0.01, lease_seconds=2.0, shard_bytes=1 << 16),
    )
    run.recipe.write_text(dump_recipe(recipe))
    return run


def start(run: Run, *, attempt: int) -> "subprocess.Popen[bytes]":
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PRORL_RUN_DIR": str(run.root),
        "PRORL_JOB": "buffer",
        "PRORL_ROLE": "buffer",
        "PRORL_INDEX": "0",
        "PRORL_ATTEMPT": str(attempt),
        "PRORL_SCRATCH": str(run.root),
    }
    command = [sys.executable, "-m", "prorl_hpc.buffer", "--run", str(run.root)]
    with (run.root / f"buffer-{attempt}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
    process.wait(DEADLINE_SECONDS)


def published(run: Run, process: "subprocess.Popen[bytes]", *, attempt: int) -> None:
    """Waits until this attempt listens."""

    def ready() -> bool:
        assert process.poll() is None, (run.root / f"buffer-{attempt}.log").read_text()
        path = run.endpoint("buffer")
        return path.exists() and f'"attempt":{attempt}' in path.read_text()

    wait_for(ready, what="the buffer's endpoint")


def learner_of(run: Run) -> LearnerClient:
    return LearnerClient(
        locate_buffer(run),
        keys=load_client_keys(run, role="learner"),
        run=run.name,
        attempt=1,
        patience_seconds=DEADLINE_SECONDS,
    )


async def work(run: Run, worker: str, acked: set[tuple[int, int]]) -> None:
    """An honest node: leases, pushes, and notes what was acked; goes on over restarts."""
    client = await RolloutClient.connect(
        locate_buffer(run),
        keys=load_client_keys(run, role="rollout"),
        run=run.name,
        worker=worker,
        attempt=1,
        patience_seconds=DEADLINE_SECONDS,
    )
    try:
        while True:
            reply = await client.lease(4)
            for lease in reply.leases:
                results = await client.push(produce(lease, worker=worker))
                acked |= {k for k, r in results.items() if r in ("stored", "duplicate")}
            if not reply.leases:
                await asyncio.sleep(0.05)
    finally:
        await client.close()


def test_kill_9_while_pushing_loses_nothing_and_stores_nothing_twice(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run 'quoted'")
    rng = random.Random(5)
    acked: set[tuple[int, int]] = set()
    process = start(run, attempt=1)
    learner = learner_of(run)
    refs: list[GroupRef] = []

    async def scenario() -> None:
        nonlocal process
        nodes = [asyncio.create_task(work(run, f"w{i}", acked)) for i in range(3)]
        try:
            for attempt in range(2, 6):
                before = len(acked)
                target = before + rng.randint(5, 25)
                for _ in range(int(DEADLINE_SECONDS / 0.01)):
                    if len(acked) >= min(target, 4 * NUM_GROUPS):
                        break
                    await asyncio.sleep(0.01)
                process.kill()
                process.wait()
                process = start(run, attempt=attempt)
            for _ in range(int(DEADLINE_SECONDS)):
                refs.extend(
                    await asyncio.to_thread(
                        learner.take, NUM_GROUPS - len(refs), timeout_seconds=1.0
                    )
                )
                if len(refs) == NUM_GROUPS:
                    break
        finally:
            for node in nodes:
                node.cancel()
            await asyncio.gather(*nodes, return_exceptions=True)

    try:
        published(run, process, attempt=1)
        learner.announce(0, consumed=GroupIds(), filtered=0, step=0)
        asyncio.run(scenario())
        learner.finish("the test is over")
        assert process.wait(DEADLINE_SECONDS) == EXIT_DONE
    finally:
        learner.close()
        end(process)
    assert sorted(ref.group_id for ref in refs) == list(range(NUM_GROUPS))
    lines = [line for line, _ in read_lines(run.manifest)]
    sealed = [x for x in lines if isinstance(x, Shard) and not isinstance(x, Merged)]
    for shards in (sealed, live_shards(lines).values()):
        rows = [row[:2] for line in shards for row in line.rows]
        assert len(rows) == len(set(rows)) == 4 * NUM_GROUPS
    assert {p.name for p in run.shards.iterdir()} == {
        run.shard(number).name for number in live_shards(lines)
    }
    assert acked <= set(rows)
    closed = [line.group for line in lines if isinstance(line, Closed)]
    assert len(closed) == len(set(closed))
    reader = GroupReader(run)
    for ref in refs:
        assert [t.rollout_index for t in reader.read(ref).trajectories] == [0, 1, 2, 3]
    reader.close()


def test_sigterm_is_a_clean_stop_and_a_finished_run_ends_at_once(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run")
    process = start(run, attempt=1)
    learner = learner_of(run)
    try:
        published(run, process, attempt=1)
        learner.announce(0, consumed=GroupIds(), filtered=0, step=0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == EXIT_CONTINUE
        assert not run.endpoint("buffer").exists()
        process = start(run, attempt=2)
        published(run, process, attempt=2)
        learner.finish("enough")
        assert process.wait(DEADLINE_SECONDS) == EXIT_DONE
        process = start(run, attempt=3)
        assert process.wait(DEADLINE_SECONDS) == EXIT_DONE
        assert b'"phase":"finished"' in run.metrics("buffer").read_bytes()
    finally:
        learner.close()
        end(process)


def test_missing_keys_are_one_line_and_exit_2(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run")
    (run.secrets / "curve-server.json").unlink()
    process = start(run, attempt=1)
    try:
        assert process.wait(DEADLINE_SECONDS) == EXIT_USER
    finally:
        with suppress(ProcessLookupError):
            end(process)
    text = (run.root / "buffer-1.log").read_text()
    assert "curve-server.json" in text
    assert "Traceback" not in text
