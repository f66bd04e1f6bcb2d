"""Shards, wire frames and the export: what goes in comes out."""

import fcntl
import hashlib
import io
import json
import time
from dataclasses import fields, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import h5py
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_hpc.buffer import frames
from prorl_hpc.buffer.digest import DigestError, digest_of, file_digest
from prorl_hpc.buffer.export import ExportError, export
from prorl_hpc.buffer.image import shard_image, write_shard
from prorl_hpc.buffer.manifest import Closed, ManifestWriter, Owner, Shard
from prorl_hpc.buffer.messages import Push, WireError
from prorl_hpc.buffer.parcel import RUN, pack, runs_of
from prorl_hpc.buffer.shard import OpenShard, ShardDamaged, ShardError
from prorl_hpc.records import Kind, Outcome, RecordError, Trajectory
from prorl_hpc.run import Run
from tests.prorl_hpc.buffer.buffer_helpers import make_trajectory, wait_for


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
    shard = OpenShard(path, number=1, digest=digest)
    assert len(shard) == len(made)
    for row, trajectory in enumerate(made):
        assert_equal(sent[row].trajectory(), trajectory)
        assert shard.parcel(row).row == sent[row].row
        assert_equal(shard.read(row), trajectory)
    shard.close()


def test_any_hdf5_reader_can_read_a_shard(tmp_path: Path) -> None:
    made = [make_trajectory(1, 0, num_tokens=3), make_trajectory(2, 1, num_tokens=5)]
    made[1].tokens[0] = 0x12_3456
    write_shard(tmp_path / "1.h5", image=shard_image(made))
    with h5py.File(tmp_path / "1.h5") as file:
        assert file["table"]["num_tokens"].tolist() == [3, 5]
        tokens = file["tokens_low"][3:8] + 65536 * file["tokens_high"][3:8].astype(int)
        assert tokens.tolist() == made[1].tokens.tolist()
        # Half of each is a prompt: 1 of 3 and 2 of 5 tokens, then the sampled ones.
        assert file["runs"]["length"].tolist() == [1, 2, 2, 3]
        assert file["runs"]["version"].tolist() == [-1, 0, -1, 0]
        assert file["runs"]["loss_mask"].tolist() == [0, 1, 0, 1]
        assert file["table"]["num_runs"].tolist() == [2, 2]
        assert file["table"]["num_logprobs"].tolist() == [2, 3]
        assert file["logprobs"][2:5].tolist() == made[1].logprobs[2:].tolist()
        assert file["table"]["group_id"].tolist() == [1, 2]
        assert file["table"]["num_sampled"].tolist() == [2, 3]
        assert file["table"]["oldest_version"].tolist() == [0, 0]
        assert file["groups"]["num_rows"].tolist() == [1, 1]


def test_a_shard_is_read_where_locks_are_refused(tmp_path: Path) -> None:
    """HDF5 locks what it opens, unless it is told not to: some mounts answer that with an error."""
    path = tmp_path / "1.h5"
    digest = write_shard(path, image=shard_image([make_trajectory(1, 0)]))
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="lock"):
            h5py.File(path, "r", locking=True)
        shard = OpenShard(path, number=1, digest=digest)
        assert shard.read(0).group_id == 1
        shard.close()


def test_a_newer_shard_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "1.h5"
    write_shard(path, image=shard_image([make_trajectory(1, 0)]))
    with h5py.File(path, "r+") as file:
        file.attrs["format"] = 3
    digest = digest_of([path.read_bytes()])
    with pytest.raises(ShardError, match="format=3"):
        OpenShard(path, number=1, digest=digest)


@pytest.mark.parametrize("token", [-1, 1 << 24, -(1 << 31)])
def test_a_token_id_of_more_than_three_bytes_never_leaves_the_node(token: int) -> None:
    odd = make_trajectory(1, 0)
    odd.tokens[3] = token
    with pytest.raises(RecordError, match=r"token id, or one above 16777215"):
        frames.encode_push([odd])
    odd.tokens[3] = (1 << 24) - 1
    (parcel,) = frames.decode_push(*frames.encode_push([odd]))
    assert_equal(parcel.trajectory(), odd)


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
    shard = OpenShard(path, number=1, digest=digest)
    with pytest.raises(ShardDamaged, match=r"row 0: .*components"):
        shard.read(0)
    shard.close()


def test_what_is_no_text_in_a_detail_goes_over_the_wire_as_question_marks() -> None:
    odd = replace(make_trajectory(1, 0), detail="can't read a\udcffb")
    body, arrays = frames.encode_push([odd])
    (read,) = frames.decode_push(frames.decode_request(frames.encode_body(body)), arrays)  # type: ignore[arg-type]
    assert read.detail == "can't read a?b"


@given(cut=st.integers(0, 2), size=st.integers(0, 40))
def test_frames_that_dont_fit_are_refused(cut: int, size: int) -> None:
    body, arrays = frames.encode_push([make_trajectory(1, 0, num_tokens=4)])
    if size == len(arrays[cut]):
        return
    arrays[cut] = bytes(size)
    with pytest.raises(WireError, match="frame"):
        frames.decode_push(body, arrays)


def a_push(*lengths: int) -> tuple[Push, list[frames.Frame]]:
    return frames.encode_push([make_trajectory(1, i, num_tokens=n) for i, n in enumerate(lengths)])


def test_rows_that_disagree_with_their_frames_are_refused() -> None:
    body, arrays = a_push(4, 6)
    first, second = body.rows
    change = msgspec.structs.replace
    wrong: dict[str, list[Push]] = {
        # Each row's sums are its own: what one lacks the other mustn't have.
        "cover": [
            change(body, rows=(change(first, length=5), change(second, length=5))),
            change(body, rows=(change(first, num_runs=1), change(second, num_runs=3))),
            change(body, rows=(change(first, length=1 << 60), second)),
        ],
        "sampled tokens": [
            change(body, rows=(change(first, num_logprobs=1), change(second, num_logprobs=4)))
        ],
        "negative": [change(body, rows=(change(first, length=-4), change(second, length=14)))],
        "blocks": [change(body, blocks=(3,)), change(body, blocks=(1,))],
        "array frames": [change(body, blocks=(1, 1)), change(body, blocks=())],
        "bytes for": [
            change(body, rows=(change(first, num_runs=1 << 60), second)),
            change(body, rows=(change(first, num_logprobs=4), second)),
        ],
    }
    for what, pushes in wrong.items():
        for push in pushes:
            with pytest.raises(WireError, match=what):
                frames.decode_push(push, arrays)


def test_runs_of_a_hostile_push_are_refused() -> None:
    body, arrays = a_push(4)
    runs = np.frombuffer(arrays[0], dtype=RUN)
    for field, values in (("length", [0, 4]), ("loss_mask", [0, 2]), ("length", [1 << 31, 2])):
        odd = runs.copy()
        odd[field] = values
        with pytest.raises(WireError, match="runs"):
            frames.decode_push(body, [odd.tobytes(), *arrays[1:]])


def test_blocks_hold_whole_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "BLOCK_BYTES", 100)
    body, arrays = a_push(10, 15, 1, 60, 0)
    assert body.blocks == (2, 1, 1, 1)  # 40 + 60 bytes; 4, as 240 more are too many
    assert [len(a) for a in arrays[1::2]] == [75, 3, 180, 0]  # 3 bytes a token
    for row, parcel in enumerate(frames.decode_push(body, arrays)):
        length = body.rows[row].length
        assert_equal(parcel.trajectory(), make_trajectory(1, row, num_tokens=length))


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(-1, 2)), max_size=30))
def test_runs_give_back_mask_and_versions(pairs: list[tuple[int, int]]) -> None:
    mask = np.array([m for m, _ in pairs], dtype=np.uint8)
    versions = np.array([v for _, v in pairs], dtype=np.int32)
    runs = runs_of(mask, versions)
    assert np.array_equal(np.repeat(runs["loss_mask"], runs["length"]), mask)
    assert np.array_equal(np.repeat(runs["version"], runs["length"]), versions)
    # The independent count: one more than there are changes.
    changes = sum(a != b for a, b in pairwise(pairs))
    assert len(runs) == (changes + 1 if pairs else 0)


def test_log_probabilities_that_are_not_zero_elsewhere_are_kept() -> None:
    plain = make_trajectory(1, 0, num_tokens=6)
    assert pack(plain).row.num_logprobs == 3
    for value in (-0.5, -0.0, np.nan):
        odd = replace(plain, logprobs=plain.logprobs.copy())
        odd.logprobs[0] = value
        parcel = pack(odd)
        assert parcel.row.num_logprobs == 6
        assert parcel.trajectory().logprobs.tobytes() == odd.logprobs.tobytes()
    # A sampled token whose log-probability is 0 is no reason for it.
    plain.logprobs[-1] = 0.0
    assert pack(plain).row.num_logprobs == 3
    assert_equal(pack(plain).trajectory(), plain)


def test_what_came_in_one_message_is_written_as_one_piece(tmp_path: Path) -> None:
    """And what of it wasn't accepted isn't written."""
    now = int(time.time())
    body, arrays = a_push(40, 50, 60)
    sent = frames.decode_push(body, arrays)
    assert len(sent) == 3
    for chosen in (
        sent,
        sent[:2],
        sent[1:],
        [sent[0], sent[2]],
        [*sent, pack(make_trajectory(2, 0))],
    ):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.h5"
        shard = OpenShard(path, number=1, digest=write_shard(path, image=shard_image(chosen)))
        for row, parcel in enumerate(chosen):
            assert_equal(shard.read(row), parcel.trajectory())
        shard.close()
    whole = shard_image(sent)
    wait_for(lambda: int(time.time()) > now, what="the clock's next second")  # no time is in it
    parts = shard_image([pack(p.trajectory()) for p in sent])
    assert b"".join(whole.parts) == b"".join(parts.parts)
    assert len(whole.parts) < len(parts.parts)


def test_digests_name_their_algorithm() -> None:
    data = bytes(range(256)) * 20_000  # several chunks
    old = f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert file_digest(io.BytesIO(data), like=old) == old
    new = digest_of([data[:100], data[100:]])
    assert file_digest(io.BytesIO(data), like=new) == new
    with pytest.raises(DigestError, match="crc"):
        file_digest(io.BytesIO(data), like="crc:0")


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
            Shard(number=1, digest=digest, num_bytes=1, rows=rows),
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
