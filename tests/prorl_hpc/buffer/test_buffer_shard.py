"""Shards, wire frames and the export: what goes in comes out."""

import json
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_hpc.buffer import frames
from prorl_hpc.buffer.export import ExportError, export
from prorl_hpc.buffer.manifest import Closed, ManifestWriter, Owner, Shard
from prorl_hpc.buffer.messages import Push, WireError
from prorl_hpc.buffer.shard import OpenShard, ShardDamaged, ShardError, shard_image, write_shard
from prorl_hpc.records import Kind, Outcome, RecordError, Trajectory
from prorl_hpc.run import Run
from tests.prorl_hpc.buffer.buffer_helpers import make_trajectory


def assert_equal(left: Trajectory, right: Trajectory) -> None:
    for field in fields(Trajectory):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            assert np.array_equal(a, b, equal_nan=True)
        else:
            assert a == b, field.name


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    detail=st.text(max_size=10),
    failed=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_shard_and_wire_give_back_what_was_put_in(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], detail: str, failed: bool
) -> None:
    made = [
        replace(make_trajectory(5, i, num_tokens=n), detail=detail) for i, n in enumerate(lengths)
    ]
    if failed:
        outcome = Outcome.infrastructure_failure
        made[0] = replace(made[0], outcome=outcome, reward=None)
    body, arrays = frames.encode_push(made)
    decoded = frames.decode_request(frames.encode_body(body))
    assert isinstance(decoded, Push)
    sent = frames.decode_push(decoded, arrays)
    path = tmp_path_factory.mktemp("shard") / "1.h5"
    image = shard_image(sent)
    digest = write_shard(path, image=image)
    assert path.stat().st_size == image.num_bytes
    shard = OpenShard(path, number=1, sha256=digest)
    assert len(shard) == len(made)
    for row, trajectory in enumerate(made):
        assert_equal(sent[row], trajectory)
        assert_equal(shard.read(row), trajectory)
    shard.close()


def test_any_hdf5_reader_can_read_a_shard(tmp_path: Path) -> None:
    made = [make_trajectory(1, 0, num_tokens=3), make_trajectory(2, 1, num_tokens=5)]
    write_shard(tmp_path / "1.h5", image=shard_image(made))
    with h5py.File(tmp_path / "1.h5") as file:
        assert file["offsets"][:].tolist() == [0, 3, 8]
        assert file["tokens"][3:8].tolist() == made[1].tokens.tolist()
        assert file["table"]["group_id"].tolist() == [1, 2]
        assert file["groups"]["num_rows"].tolist() == [1, 1]


def test_a_newer_shard_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "1.h5"
    write_shard(path, image=shard_image([make_trajectory(1, 0)]))
    with h5py.File(path, "r+") as file:
        file.attrs["format"] = 2
    import hashlib

    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ShardError, match="format=2"):
        OpenShard(path, number=1, sha256=digest)


def test_bad_trajectories_never_leave_the_node() -> None:
    for reward in (float("nan"), float("inf"), True):
        with pytest.raises(RecordError, match="reward"):
            frames.encode_push([replace(make_trajectory(1, 0), reward=reward)])
    odd = replace(make_trajectory(1, 0), components={"share": float("nan")})
    with pytest.raises(RecordError, match="component share=nan"):
        frames.encode_push([odd])


def test_a_row_that_cannot_be_read_is_damage_and_no_crash(tmp_path: Path) -> None:
    """As a version that let such a component through has written it."""
    path = tmp_path / "1.h5"
    odd = replace(make_trajectory(1, 0), components={"share": float("nan")})
    digest = write_shard(path, image=shard_image([odd]))
    shard = OpenShard(path, number=1, sha256=digest)
    with pytest.raises(ShardDamaged, match=r"row 0: .*components"):
        shard.read(0)
    shard.close()


def test_what_is_no_text_in_a_detail_goes_over_the_wire_as_question_marks() -> None:
    odd = replace(make_trajectory(1, 0), detail="can't read a\udcffb")
    body, arrays = frames.encode_push([odd])
    (read,) = frames.decode_push(frames.decode_request(frames.encode_body(body)), arrays)  # type: ignore[arg-type]
    assert read.detail == "can't read a?b"


@given(cut=st.integers(0, 3), size=st.integers(0, 40))
def test_frames_that_dont_fit_are_refused(cut: int, size: int) -> None:
    body, arrays = frames.encode_push([make_trajectory(1, 0, num_tokens=4)])
    if size == len(arrays[cut]):
        return
    arrays[cut] = bytes(size)
    with pytest.raises(WireError, match="frame"):
        frames.decode_push(body, arrays)


def test_export(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.shards.mkdir(parents=True)
    made = [make_trajectory(0, i) for i in range(3)]
    made[1].logprobs[-1] = -np.inf
    digest = write_shard(run.shard(1), image=shard_image(made))
    writer = ManifestWriter(run.manifest, owner=1)
    rows = tuple((0, i, True) for i in range(3))
    writer.append(
        [
            Owner(format=1, attempt=1, host="h"),
            Shard(number=1, sha256=digest, num_bytes=1, rows=rows),
            Closed(
                group=0,
                kind=Kind.train,
                task="sums",
                instance_id="sums-0",
                num_rollouts=4,
                rollouts=((0, 1, 0, True), (1, 1, 1, True), (2, 1, 2, False)),
                reason="deadline",
            ),
        ]
    )
    writer.close()
    assert export(run, tmp_path / "out.jsonl") == 2
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert first["tokens"] == made[0].tokens.tolist()
    assert (second["rollout_index"], second["logprobs"][-1]) == (1, None)
    assert export(run, tmp_path / "out.jsonl", kind=Kind.validation) == 0
    with pytest.raises(ExportError, match=r"\.csv"):
        export(run, tmp_path / "out.csv")
    if find_spec("pyarrow") is None:
        with pytest.raises(ExportError, match="pyarrow"):
            export(run, tmp_path / "out.parquet")
