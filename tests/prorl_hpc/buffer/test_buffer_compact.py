"""Small shards are merged; old references, restarts and crashes amid it lose and repeat nothing."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from prorl_hpc.buffer.compact import FAN_IN, SmallShards
from prorl_hpc.buffer.export import records
from prorl_hpc.buffer.groups import reference
from prorl_hpc.buffer.manifest import (
    Closed,
    Line,
    ManifestWriter,
    Merged,
    Moves,
    Shard,
    live_shards,
    valid_lines,
)
from prorl_hpc.buffer.messages import GroupRef
from prorl_hpc.buffer.reader import GroupReader
from prorl_hpc.buffer.server import ServerConfig
from prorl_hpc.run import Run
from tests.prorl_hpc.buffer.buffer_helpers import (
    Running,
    make_config,
    make_run,
    make_trajectory,
    produce,
    serving,
    wait_for,
)

CONFIG = make_config(batch_groups=8, max_staleness=0)
NUM_ROLLOUTS = 32
LIMITS = ServerConfig(
    seal_seconds=0.0, shard_bytes=1 << 20, farewell_seconds=0.5, goodbye_seconds=0.1
)


class Crash(BaseException):
    """Stands for the end of the process at that point."""


def shard(number: int, *, num_bytes: int, num_rows: int = 1) -> Shard:
    return Shard(number=number, num_bytes=num_bytes, rows=((number, 0, True),) * num_rows)


async def push_one_by_one(buffer: Running) -> None:
    """Each trajectory makes a shard of its own."""
    client = await buffer.rollout()
    try:
        for lease in (await client.lease(NUM_ROLLOUTS)).leases:
            for trajectory in produce(lease):
                assert list((await client.push([trajectory])).values()) == ["stored"]
    finally:
        await client.close()


def assert_readable(run: Run, refs: Iterable[GroupRef]) -> None:
    reader = GroupReader(run)
    for ref in refs:
        found = reader.read(ref).trajectories
        assert [t.key for t in found] == [(ref.group_id, r) for r in range(4)]
        for t in found:
            assert np.array_equal(t.tokens, make_trajectory(*t.key).tokens)
    reader.close()


def num_files(run: Run) -> int:
    return sum(path.suffix == ".h5" for path in run.shards.iterdir())


def test_shards_are_chosen_by_tier_and_within_bounds() -> None:
    small = SmallShards(shard_bytes=1000)
    for number in range(FAN_IN - 1):
        small.add(shard(number, num_bytes=100))
    small.add(shard(50, num_bytes=5))  # another tier
    small.add(shard(51, num_bytes=900))  # large enough as it is
    assert small.choose() == []
    small.add(shard(60, num_bytes=100))
    assert small.choose(backlog=2) == []
    assert [line.number for line in small.choose()] == list(range(10))  # 10 * 100 bytes
    small.remove(3)
    assert small.choose() == []


def test_places_are_followed_through_merges() -> None:
    first = Merged(number=7, num_bytes=1, rows=(), sources=((1, 0), (2, 3)))
    second = Merged(number=9, num_bytes=1, rows=(), sources=((5, 0), (7, 4)))
    moves = Moves([first, second])
    assert moves.place(2, 1) == (9, 8)  # row 3 + 1 of shard 7, which begins at row 4 of shard 9
    assert moves.place(3, 1) == (3, 1)
    assert list(live_shards([shard(n, num_bytes=1) for n in (1, 2, 3)] + [first])) == [3, 7]


def test_old_references_outlive_merges_and_restarts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with serving(run, config=CONFIG, server=LIMITS) as buffer:
        learner = buffer.learner()
        open_before = GroupReader(run)
        asyncio.run(push_one_by_one(buffer))
        refs = learner.take(8, timeout_seconds=60)
        wait_for(lambda: num_files(run) < FAN_IN, what="small shards to be merged")
        closed = [x for x in valid_lines(run.manifest) if isinstance(x, Closed)]
        refs += [reference(line) for line in closed]  # places as they were
        assert_readable(run, refs)
        assert len(open_before.read(refs[0]).trajectories) == 4
        open_before.close()
        learner.close()
    with serving(run, config=CONFIG, server=LIMITS, attempt=2) as buffer:
        learner = buffer.learner(attempt=2)
        again = learner.take(8, timeout_seconds=60)
        assert [ref.group_id for ref in again] == list(range(8))
        assert learner.status().trajectories == NUM_ROLLOUTS
        assert_readable(run, [*refs, *again])
        # A learner that reports the old place of a moved group just gets it again.
        line = next(x for x in valid_lines(run.manifest) if isinstance(x, Merged))
        group_id, (source, _) = line.rows[0][0], line.sources[0]
        learner.damaged(source, group_id=group_id, reason="the file is gone")
        assert [ref.group_id for ref in learner.take(1, timeout_seconds=60)] == [group_id]
        learner.close()
    assert len(list(records(run))) == NUM_ROLLOUTS


@pytest.mark.parametrize("recorded", [False, True])
def test_a_crash_amid_a_merge_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    run = make_run(tmp_path / "run")
    append = ManifestWriter.append

    def crash(writer: ManifestWriter, lines: Iterable[Line]) -> None:
        lines = list(lines)
        merged = any(isinstance(line, Merged) for line in lines)
        if recorded or not merged:
            append(writer, lines)
        if merged:
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(ManifestWriter, "append", crash)
        buffer = Running(run, config=CONFIG, server=LIMITS)
        learner = buffer.learner()

        async def node() -> None:
            task = asyncio.create_task(push_one_by_one(buffer))
            await asyncio.to_thread(buffer.join)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(node())
        learner.close()
    assert isinstance(buffer.ended, Crash)
    before = num_files(run)
    with serving(run, config=make_config(batch_groups=8, max_staleness=0, lease_seconds=1.0),
                 server=LIMITS, attempt=2) as buffer:  # fmt: skip
        assert (num_files(run) < before) if recorded else (num_files(run) == before - 1)
        learner = buffer.learner(attempt=2)
        stored = learner.status().trajectories
        assert stored == sum(len(x.rows) for x in live_shards(valid_lines(run.manifest)).values())

        async def rest() -> None:
            client = await buffer.rollout("w1")
            made = stored
            while made < NUM_ROLLOUTS:
                for lease in (await client.lease(64)).leases:
                    made += len(await client.push(produce(lease)))
            await client.close()

        asyncio.run(rest())
        refs = learner.take(8, timeout_seconds=60)
        assert [ref.group_id for ref in refs] == list(range(8))
        assert_readable(run, refs)
        learner.close()
