"""A shard's bytes, and their way to the disk. Knows the format, not who reads it.

Flat arrays over all trajectories of the shard: `tokens_low:u2` and `tokens_high:u1` (a token id is
low + 65536 * high), `logprobs:f4`, `runs` and `side` (JSON); see `parcel` for what they hold.
`table`: one fixed-size record per trajectory, which also says how many elements of each are its
own; `groups`: one record per group.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import msgspec
import numpy as np
from numpy.typing import NDArray

from hpc.files import write_all
from prorl_hpc.buffer.digest import Hasher
from prorl_hpc.buffer.parcel import RUN, Block, Parcel, join_arrays, pack
from prorl_hpc.records import Trajectory

FORMAT = 2

ARRAYS = (("tokens_low", "<u2"), ("tokens_high", "u1"), ("logprobs", "<f4"))
"""Big ones, written without passing through HDF5."""

PIECE_BYTES = 1 << 20
"""Hashed and copied to the page cache together: read from memory once."""
NONE_SAMPLED = 1 << 40
"""Above any version."""

TABLE = np.dtype(
    [
        ("group_id", "<i8"),
        ("rollout_index", "<i4"),
        ("reward", "<f8"),
        ("oldest_version", "<i4"),
        ("num_sampled", "<i4"),
        ("outcome", "S24"),
        ("kind", "S12"),
        ("num_tokens", "<i8"),
        ("num_logprobs", "<i8"),
        ("num_runs", "<i8"),
        ("num_side_bytes", "<i8"),
    ]
)
GROUPS = np.dtype([("group_id", "<i8"), ("num_rows", "<i4"), ("kind", "S12")])


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


_side = msgspec.json.Encoder()


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardImage:
    """A shard file that isn't written yet, as consecutive pieces."""

    parts: tuple[memoryview, ...]
    num_bytes: int


def shard_image(trajectories: Sequence[Trajectory | Parcel]) -> ShardImage:
    """The bytes of a shard file; its pieces are the trajectories' own memory.

    HDF5 lays the file out in memory, with the big arrays allocated and not written: those go from
    the received messages to the disk without passing through HDF5, which would copy them several
    times and doesn't survive a full disk.
    """
    parcels = [t if isinstance(t, Parcel) else pack(t) for t in trajectories]
    pieces = _gathered(parcels)
    with os.fdopen(os.memfd_create("shard"), "w+b") as memory:
        places = _write_skeleton(memory, parcels)
        memory.flush()
        descriptor = memory.fileno()
        end = os.fstat(descriptor).st_size
        parts, position = [], 0
        for at, name, size in sorted(places):
            parts += [_read(descriptor, position, at), *pieces[name]]
            position = at + size
        parts.append(_read(descriptor, position, max(end, position)))
    return ShardImage(
        parts=tuple(part for part in parts if len(part)), num_bytes=max(end, position)
    )


def write_shard(path: Path, *, image: ShardImage) -> str:
    """Makes `path` durable with these bytes and returns their digest.

    Never replaces a file. Raises OSError with nothing left behind.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    hasher = Hasher()
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all(descriptor, image.parts, hasher=hasher)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if path.exists():
            raise FileExistsError(f"{path} exists; two buffer jobs write into one run")
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return hasher.digest()


def _gathered(parcels: Sequence[Parcel]) -> dict[str, list[memoryview]]:
    """The big arrays' memory in order; what came together in one message is one piece."""
    pieces: dict[str, list[memoryview]] = {name: [] for name, _ in ARRAYS}
    for block, run in groupby(parcels, key=lambda p: p.block):
        together = list(run)
        whole = block is not None and _is_whole(block, together)
        for source in [block] if whole and block is not None else together:
            arrays = (source.low, source.high, source.logprobs)
            for (name, _), array in zip(ARRAYS, arrays, strict=True):
                pieces[name].append(array.view(np.uint8).data)
    return pieces


def _is_whole(block: Block, parcels: Sequence[Parcel]) -> bool:
    """Whether these are all that lie in it. They come in its order, each once."""
    return len(parcels) == block.num_rows


def _write_all(descriptor: int, parts: Sequence[memoryview], *, hasher: Hasher) -> None:
    """Hashes each piece just before it is copied to the page cache."""
    for piece in _pieces(parts):
        for part in piece:
            hasher.update(part)
        write_all(descriptor, piece)


def _pieces(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    piece: list[memoryview] = []
    size = 0
    for part in parts:
        if piece and size + len(part) > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(part)
        size += len(part)
    if piece:
        yield piece


def _write_skeleton(memory: BinaryIO, parcels: Sequence[Parcel]) -> list[tuple[int, str, int]]:
    """All but the big arrays' values; (offset in the file, name, bytes) of those."""
    sides = [_side_bytes(p) for p in parcels]
    runs = np.frombuffer(join_arrays(p.runs for p in parcels), dtype=RUN)
    table = _table(parcels, runs, sides)
    counts = [int(table[name].sum()) for name in ("num_tokens", "num_tokens", "num_logprobs")]
    places = []
    with h5py.File(memory, "w", libver="v110") as file:
        file.attrs["format"] = FORMAT
        _put(file, "table", table)
        _put(file, "groups", _group_table(parcels))
        _put(file, "runs", runs)
        _put(file, "side", np.frombuffer(b"".join(sides), dtype=np.uint8))
        layout = _timeless()
        layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        for (name, dtype), count in zip(ARRAYS, counts, strict=True):
            space = h5py.h5s.create_simple((count,))
            kind = h5py.h5t.py_create(np.dtype(dtype))
            offset = h5py.h5d.create(file.id, name.encode(), kind, space, layout).get_offset()
            if offset is not None:
                places.append((int(offset), name, count * np.dtype(dtype).itemsize))
    return places


def _timeless() -> Any:
    """Creation properties without a time: the same trajectories make the same bytes."""
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_obj_track_times(False)
    return layout


def _put(file: h5py.File, name: str, values: NDArray[Any]) -> None:
    """A small dataset, without what h5py's convenience costs."""
    space = h5py.h5s.create_simple(values.shape)
    kind = h5py.h5t.py_create(values.dtype, logical=True)
    dataset = h5py.h5d.create(file.id, name.encode(), kind, space, _timeless())
    if values.size:
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values)


def _read(descriptor: int, start: int, stop: int) -> memoryview:
    parts = []
    while start < stop:
        part = os.pread(descriptor, stop - start, start)
        if not part:  # behind the end of what HDF5 has written
            part = bytes(stop - start)
        parts.append(part)
        start += len(part)
    return memoryview(b"".join(parts))


def _side_bytes(p: Parcel) -> bytes:
    row = p.row
    return _side.encode(
        Side(
            task=row.task,
            instance_id=row.instance_id,
            components=row.components,
            finish_reason=row.finish_reason,
            timings=row.timings,
            isolation=row.isolation,
            worker=row.worker,
            attempt=row.attempt,
            detail=row.detail,
        )
    )


def _table(
    parcels: Sequence[Parcel], runs: NDArray[np.void], sides: Sequence[bytes]
) -> NDArray[np.void]:
    table = np.empty(len(parcels), dtype=TABLE)
    if not parcels:
        return table
    rows = [p.row for p in parcels]
    table["group_id"] = [row.group_id for row in rows]
    table["rollout_index"] = [row.rollout_index for row in rows]
    table["reward"] = [math.nan if row.reward is None else row.reward for row in rows]
    table["outcome"] = [p.outcome.value.encode() for p in parcels]
    table["kind"] = [p.kind.value.encode() for p in parcels]
    table["num_tokens"] = [row.length for row in rows]
    table["num_logprobs"] = [row.num_logprobs for row in rows]
    table["num_runs"] = [row.num_runs for row in rows]
    table["num_side_bytes"] = [len(side) for side in sides]
    # Of the sampled runs alone; a trajectory without one has none.
    owner = np.repeat(np.arange(len(parcels)), table["num_runs"])
    sampled = runs["loss_mask"] == 1
    owner, runs = owner[sampled], runs[sampled]
    oldest = np.full(len(parcels), NONE_SAMPLED, dtype=np.int64)
    np.minimum.at(oldest, owner, runs["version"].astype(np.int64))
    table["oldest_version"] = np.where(oldest == NONE_SAMPLED, -1, oldest)
    table["num_sampled"] = np.bincount(owner, runs["length"], minlength=len(parcels))
    return table


def _group_table(parcels: Sequence[Parcel]) -> NDArray[np.void]:
    counts: dict[int, int] = {}
    kinds: dict[int, bytes] = {}
    for p in parcels:
        counts[p.group_id] = counts.get(p.group_id, 0) + 1
        kinds[p.group_id] = p.kind.value.encode()
    return np.array([(g, n, kinds[g]) for g, n in counts.items()], dtype=GROUPS)
