"""One sealed shard: trajectories to HDF5 bytes and back. Knows no group state and no socket.

Flat arrays over all tokens of the shard, with `offsets` of N + 1 entries for its N trajectories:
`tokens:i4`, `logprobs:f4`, `loss_mask:u1`, `versions:i4`; `table`: one fixed-size record per
trajectory; `groups`: one record per group; `side`: JSON per trajectory, with `side_offsets`.
"""

import hashlib
import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import msgspec
import numpy as np
from numpy.typing import NDArray

from hpc.errors import HpcError
from prorl_hpc.records import Kind, Outcome, Trajectory

FORMAT = 1

ARRAYS = (("tokens", "<i4"), ("logprobs", "<f4"), ("loss_mask", "u1"), ("versions", "<i4"))
"""Flat over all tokens of the shard."""

MAX_VECTORS = 1024
"""Pieces per system call (IOV_MAX)."""

TABLE = np.dtype(
    [
        ("group_id", "<i8"),
        ("rollout_index", "<i4"),
        ("reward", "<f8"),
        ("oldest_version", "<i4"),
        ("num_sampled", "<i4"),
        ("outcome", "S24"),
        ("kind", "S12"),
    ]
)
GROUPS = np.dtype([("group_id", "<i8"), ("num_rows", "<i4"), ("kind", "S12")])


class ShardError(HpcError, ValueError):
    """A shard of a newer format."""


class ShardDamaged(ShardError):
    """A shard whose bytes aren't those that were sealed, or that is gone."""

    def __init__(self, message: str, *, shard: int) -> None:
        super().__init__(message)
        self.shard = shard


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What doesn't fit into a fixed-size record."""

    task: str
    instance_id: str
    components: dict[str, float]
    finish_reason: str
    timings: dict[str, float]
    isolation: dict[str, str]
    worker: str
    attempt: int
    detail: str


_side = msgspec.json.Decoder(Side)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardImage:
    """A shard file that isn't written yet, as consecutive pieces."""

    parts: tuple[memoryview, ...]
    num_bytes: int


def shard_image(trajectories: Sequence[Trajectory]) -> ShardImage:
    """The bytes of a shard file; its pieces are the trajectories' own memory.

    HDF5 lays the file out in memory, with the big arrays allocated and not written: those go from
    the received messages to the disk without passing through HDF5, which would copy them several
    times and doesn't survive a full disk.
    """
    lengths = [t.tokens.shape[0] for t in trajectories]
    with os.fdopen(os.memfd_create("shard"), "w+b") as memory:
        places = _write_skeleton(memory, trajectories, lengths)
        memory.flush()
        descriptor = memory.fileno()
        total, end = sum(lengths), os.fstat(descriptor).st_size
        parts, position = [], 0
        for at, name, dtype in sorted(places):
            parts += [_read(descriptor, position, at), *_pieces(trajectories, name, dtype)]
            position = at + total * np.dtype(dtype).itemsize
        parts.append(_read(descriptor, position, max(end, position)))
    return ShardImage(
        parts=tuple(part for part in parts if len(part)), num_bytes=max(end, position)
    )


def write_shard(path: Path, *, image: ShardImage) -> str:
    """Makes `path` durable with these bytes and returns their sha256.

    Never replaces a file. Raises OSError with nothing left behind.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    # The digest is computed while the disk works: both leave the interpreter to others.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-digest") as helper:
        digest = helper.submit(_digest, image.parts)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                _write_all(descriptor, image.parts)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if path.exists():
                raise FileExistsError(f"{path} exists; two buffer jobs write into one run")
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return digest.result()


class OpenShard:
    """A shard open for reading; its bytes were checked against the manifest's digest."""

    def __init__(self, path: Path, *, number: int, sha256: str) -> None:
        self.number = number
        self._path = path
        try:
            self._stream = path.open("rb", buffering=0)
        except OSError as err:
            raise self._damaged(f"{err.strerror}") from err
        try:
            digest = hashlib.file_digest(self._stream, "sha256").hexdigest()
            if digest != sha256:
                raise self._damaged(f"sha256 {digest[:12]}… where {sha256[:12]}… was sealed")
            with h5py.File(path, "r", locking=False) as file:
                self._read_index(file)
        except (OSError, KeyError, RuntimeError) as err:
            self._stream.close()
            raise self._damaged(str(err)) from err
        except BaseException:
            self._stream.close()
            raise

    def __len__(self) -> int:
        return len(self._table)

    def read(self, row: int) -> Trajectory:
        """One trajectory. Raises ShardDamaged."""
        if not 0 <= row < len(self._table):
            raise self._damaged(f"row {row} of {len(self._table)} is asked for")
        start, stop = int(self._offsets[row]), int(self._offsets[row + 1])
        try:
            arrays = {name: self._array(name, dtype, start, stop) for name, dtype in ARRAYS}
        except OSError as err:
            raise self._damaged(str(err)) from err
        return self._trajectory(row, arrays)

    def close(self) -> None:
        self._stream.close()

    def _read_index(self, file: h5py.File) -> None:
        number = int(file.attrs["format"])
        if number > FORMAT:
            raise ShardError(
                f"format={number} of {self._path} is newer than {FORMAT}; upgrade prorl-hpc"
            )
        self._offsets: NDArray[np.int64] = file["offsets"][:]
        self._table: NDArray[np.void] = file["table"][:]
        self._side_offsets: NDArray[np.int64] = file["side_offsets"][:]
        self._sides: bytes = file["side"][:].tobytes()
        # Contiguous and little-endian by the format: read without HDF5 from here on.
        self._places = {name: file[name].id.get_offset() or 0 for name, _ in ARRAYS}

    def _array(self, name: str, dtype: str, start: int, stop: int) -> NDArray[Any]:
        values = np.empty(stop - start, dtype=dtype)
        place = self._places[name] + start * values.itemsize
        if os.preadv(self._stream.fileno(), [values.data], place) != values.nbytes:
            raise OSError(f"{name} ends early")
        return values

    def _trajectory(self, row: int, arrays: dict[str, NDArray[Any]]) -> Trajectory:
        record = self._table[row]
        part = slice(int(self._side_offsets[row]), int(self._side_offsets[row + 1]))
        try:
            side = _side.decode(self._sides[part])
        except msgspec.MsgspecError as err:
            raise self._damaged(f"row {row}: {err}") from err
        reward = float(record["reward"])
        return Trajectory(
            group_id=int(record["group_id"]),
            rollout_index=int(record["rollout_index"]),
            kind=Kind(record["kind"].decode()),
            task=side.task,
            instance_id=side.instance_id,
            tokens=arrays["tokens"],
            logprobs=arrays["logprobs"],
            loss_mask=arrays["loss_mask"],
            versions=arrays["versions"],
            reward=None if math.isnan(reward) else reward,
            components=side.components,
            outcome=Outcome(record["outcome"].decode()),
            finish_reason=side.finish_reason,
            timings=side.timings,
            isolation=side.isolation,
            worker=side.worker,
            attempt=side.attempt,
            detail=side.detail,
        )

    def _damaged(self, reason: str) -> ShardDamaged:
        return ShardDamaged(
            f"shard {self.number} ({self._path}) is damaged: {reason}", shard=self.number
        )


def _pieces(trajectories: Sequence[Trajectory], name: str, dtype: str) -> Iterator[memoryview]:
    for t in trajectories:
        yield np.ascontiguousarray(getattr(t, name), dtype).view(np.uint8).data


def _digest(parts: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _write_all(descriptor: int, parts: Sequence[memoryview]) -> None:
    rest: deque[memoryview] = deque(parts)
    while rest:
        written = os.writev(descriptor, list(islice(rest, MAX_VECTORS)))
        while rest and written >= len(rest[0]):
            written -= len(rest.popleft())
        if written:
            rest[0] = rest[0][written:]


def _write_skeleton(
    memory: BinaryIO, trajectories: Sequence[Trajectory], lengths: Sequence[int]
) -> list[tuple[int, str, str]]:
    """All but the big arrays' values; returns (offset in the file, name, dtype) of those."""
    sides = [_side_bytes(t) for t in trajectories]
    places = []
    with h5py.File(memory, "w", libver="v110") as file:
        file.attrs["format"] = FORMAT
        file.attrs["num_trajectories"] = len(trajectories)
        file["offsets"] = _offsets(lengths)
        file["table"] = np.array([_record(t) for t in trajectories], dtype=TABLE)
        file["groups"] = _group_table(trajectories)
        file["side"] = np.frombuffer(b"".join(sides), dtype=np.uint8)
        file["side_offsets"] = _offsets([len(s) for s in sides])
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        for name, dtype in ARRAYS:
            space = h5py.h5s.create_simple((sum(lengths),))
            kind = h5py.h5t.py_create(np.dtype(dtype))
            offset = h5py.h5d.create(file.id, name.encode(), kind, space, layout).get_offset()
            if offset is not None:
                places.append((int(offset), name, dtype))
    return places


def _read(descriptor: int, start: int, stop: int) -> memoryview:
    parts = []
    while start < stop:
        part = os.pread(descriptor, stop - start, start)
        if not part:  # behind the end of what HDF5 has written
            part = bytes(stop - start)
        parts.append(part)
        start += len(part)
    return memoryview(b"".join(parts))


def _side_bytes(t: Trajectory) -> bytes:
    return msgspec.json.encode(
        Side(
            task=t.task,
            instance_id=t.instance_id,
            components=t.components,
            finish_reason=t.finish_reason,
            timings=t.timings,
            isolation=t.isolation,
            worker=t.worker,
            attempt=t.attempt,
            detail=t.detail,
        )
    )


def _record(t: Trajectory) -> tuple[object, ...]:
    oldest = t.oldest_version
    return (
        t.group_id,
        t.rollout_index,
        math.nan if t.reward is None else t.reward,
        -1 if oldest is None else oldest,
        int(np.count_nonzero(t.loss_mask)),
        t.outcome.value.encode(),
        t.kind.value.encode(),
    )


def _group_table(trajectories: Sequence[Trajectory]) -> NDArray[np.void]:
    counts: dict[int, int] = {}
    kinds: dict[int, bytes] = {}
    for t in trajectories:
        counts[t.group_id] = counts.get(t.group_id, 0) + 1
        kinds[t.group_id] = t.kind.value.encode()
    return np.array([(g, n, kinds[g]) for g, n in counts.items()], dtype=GROUPS)


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
