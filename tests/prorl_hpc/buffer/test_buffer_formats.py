"""Runs of earlier formats: what they have on disk is read, what can't be is refused by number."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import pytest

from prorl_hpc.buffer import digest, frames
from prorl_hpc.buffer.digest import DigestError
from prorl_hpc.buffer.manifest import FORMAT, Shard, live_shards, valid_lines
from prorl_hpc.buffer.messages import Hello, WireError
from prorl_hpc.buffer.reader import GroupReader
from prorl_hpc.buffer.recovery import recover
from prorl_hpc.buffer.shard import OpenShard
from prorl_hpc.records import Trajectory
from prorl_hpc.run import Run
from tests.prorl_hpc.buffer.buffer_helpers import make_run, make_trajectory, produce, serving


def write_flat_shard(path: Path, made: list[Trajectory]) -> str:
    """As versions with shard format 1 wrote it; returns its sha256."""
    arrays = (("tokens", "<i4"), ("logprobs", "<f4"), ("loss_mask", "u1"), ("versions", "<i4"))
    sides = [json.dumps({"task": t.task, "instance_id": t.instance_id, "components": t.components,
                         "finish_reason": t.finish_reason, "timings": t.timings,
                         "isolation": t.isolation, "worker": t.worker, "attempt": t.attempt,
                         "detail": t.detail}).encode() for t in made]  # fmt: skip
    table = [(t.group_id, t.rollout_index, t.reward, 0, 4, b"scored", b"train") for t in made]
    kinds = [("group_id", "<i8"), ("rollout_index", "<i4"), ("reward", "<f8"),
             ("oldest_version", "<i4"), ("num_sampled", "<i4"), ("outcome", "S24"),
             ("kind", "S12")]  # fmt: skip
    with h5py.File(path, "w") as file:
        file.attrs["format"] = 1
        file["offsets"] = np.cumsum([0, *(len(t.tokens) for t in made)])
        file["table"] = np.array(table, dtype=kinds)
        file["side"] = np.frombuffer(b"".join(sides), dtype=np.uint8)
        file["side_offsets"] = np.cumsum([0, *map(len, sides)])
        for name, dtype in arrays:
            flat = np.concatenate([getattr(t, name) for t in made]).astype(dtype)
            file.create_dataset(name, data=flat)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def assert_same(left: Trajectory, right: Trajectory) -> None:
    assert (left.key, left.reward, left.components) == (right.key, right.reward, right.components)
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        one, two = getattr(left, name), getattr(right, name)
        assert one.dtype == two.dtype
        assert np.array_equal(one, two)


def test_a_shard_of_format_1_is_read(tmp_path: Path) -> None:
    made = [make_trajectory(1, 0, num_tokens=3), make_trajectory(2, 1, num_tokens=5)]
    path = tmp_path / "1.h5"
    shard = OpenShard(path, number=1, digest=f"sha256:{write_flat_shard(path, made)}")
    for row, trajectory in enumerate(made):
        assert_same(shard.read(row), trajectory)
        assert_same(shard.parcel(row).trajectory(), trajectory)
    shard.close()


def age(run: Run) -> None:
    """Makes of a run what a version with manifest and shard format 1 would have left."""
    old: dict[int, tuple[str, int]] = {}
    for number, line in live_shards(valid_lines(run.manifest)).items():
        shard = OpenShard(run.shard(number), number=number, digest=line.checksum)
        made = [shard.read(row) for row in range(len(shard))]
        shard.close()
        path = run.shard(number)
        path.unlink()
        old[number] = write_flat_shard(path, made), path.stat().st_size
    lines = []
    for text in run.manifest.read_text().splitlines():
        line: dict[str, Any] = json.loads(text)
        if line["type"] == "owner":
            line["format"] = 1
        if line["type"] == "shard":
            del line["digest"]
            line["sha256"], line["num_bytes"] = old[line["number"]]
        lines.append(json.dumps(line))
    run.manifest.write_text("".join(f"{line}\n" for line in lines))


def test_a_run_of_format_1_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")

    async def node(count: int) -> None:
        client = await buffer.rollout()
        made = 0
        while made < count:
            for lease in (await client.lease(count - made)).leases:
                made += len(await client.push(produce(lease)))
        await client.close()

    with serving(run) as buffer:
        learner = buffer.learner()
        asyncio.run(node(8))
        learner.close()
    age(run)
    with serving(run, attempt=2) as buffer:
        learner = buffer.learner(attempt=2)
        asyncio.run(node(8))
        refs = learner.take(4, timeout_seconds=60)
        assert [ref.group_id for ref in refs] == [0, 1, 2, 3]
        reader = GroupReader(run)
        for ref in refs:
            for t in reader.read(ref).trajectories:
                assert_same(t, make_trajectory(*t.key))
        reader.close()
        learner.close()
    kinds = {line.checksum.partition(":")[0] for line in valid_lines(run.manifest)
             if isinstance(line, Shard)}  # fmt: skip
    assert kinds == {"sha256", digest.PREFERRED}
    # An earlier version sees the newer number before the first line that it couldn't read.
    owners = [json.loads(x) for x in run.manifest.read_text().splitlines() if '"owner"' in x]
    assert [x["format"] for x in owners if x["type"] == "owner"] == [1, FORMAT]


def test_a_digest_that_cannot_be_checked_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the package, the shards stay where they are and the error says what to install."""
    if digest.xxhash is None:
        pytest.skip("the xxhash package isn't installed")
    run = make_run(tmp_path / "run")
    with serving(run) as buffer:
        learner = buffer.learner()

        async def node() -> None:
            client = await buffer.rollout()
            for lease in (await client.lease(4)).leases:
                await client.push(produce(lease))
            await client.close()

        asyncio.run(node())
        learner.close()
    monkeypatch.setattr(digest, "xxhash", None)
    with pytest.raises(DigestError, match="pip install xxhash"):
        recover(run, attempt=2)
    assert not list(run.quarantine.iterdir())


def test_a_peer_of_another_wire_format_is_refused_by_number() -> None:
    from prorl_hpc.buffer.channel import Identity

    envelope = Identity(run="r", worker="w", attempt=1, session=1).envelope(1)
    header, _ = frames.encode(msgspec.structs.replace(envelope, format=1), Hello())
    with pytest.raises(WireError, match=r"format=1 of a message; this side speaks 2"):
        frames.decode_envelope(header)
