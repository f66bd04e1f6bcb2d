"""Finished trajectories on node-local disk until the buffer has them. Knows no socket.

One file for what is put at once, in the layout of a push; it stays until all of it is acked. It
survives a killed worker, so that the next attempt on this node hands in what the last one couldn't
(and perhaps some that it could: the buffer knows them). A full disk is no error: what can't be
spooled lives in memory alone.
"""

import contextlib
import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from hpc.files import write_all
from prorl_hpc.buffer import frames
from prorl_hpc.buffer.messages import Push, WireError
from prorl_hpc.records import Kind, Outcome, Trajectory

log = logging.getLogger("prorl_hpc.rollout")

MAGIC = b"PRLSPL2\n"
_NUMBER = struct.Struct("<Q")
"""How many parts follow; then so many of these with their lengths."""
MAX_PARTS = 1 << 16
FLAT_MAGIC = b"PRLSPL1\n"
"""Of earlier versions: one part for each of a push's rows, and of the four arrays of all tokens."""
_FLAT_LENGTHS = struct.Struct("<5Q")
SUFFIX = ".trajectory"
DAMAGE = (OSError, ValueError, WireError, msgspec.MsgspecError, struct.error)


@dataclass(kw_only=True, slots=True)
class _File:
    """One file, and who in it isn't acked."""

    keys: set[tuple[int, int]]
    num_bytes: int


class Spool:
    """A directory of trajectories that aren't acked yet; without one it keeps nothing."""

    def __init__(self, directory: Path | None, *, limit_bytes: int) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._files: dict[Path, _File] = {}
        self._places: dict[tuple[int, int], Path] = {}
        self.num_bytes = 0
        self._warned = False
        if directory is not None:
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as err:
                self._give_up(err)

    def put(self, *trajectories: Trajectory) -> bool:
        """Keeps a copy, in one file if there is room; False when not all could be kept."""
        if self._directory is None or not trajectories:
            return False
        parts = _encode(trajectories)
        size = sum(len(part) for part in parts)
        if self.num_bytes + size > self._limit_bytes:
            half = len(trajectories) // 2
            if not half:
                return False
            kept = [self.put(*trajectories[:half]), self.put(*trajectories[half:])]
            return all(kept)
        path = self._path(trajectories[0].key)
        temporary = path.with_suffix(".tmp")
        try:
            with temporary.open("wb", buffering=0) as stream:
                write_all(stream.fileno(), parts)
            temporary.rename(path)
        except OSError as err:
            temporary.unlink(missing_ok=True)
            self._warn(f"spool: {err}; trajectories are kept in memory")
            return False
        self._keep(path, trajectories, num_bytes=size)
        return True

    def remove(self, key: tuple[int, int]) -> None:
        """The buffer has it."""
        path = self._places.pop(key, None)
        if path is None:
            return
        file = self._files[path]
        file.keys.discard(key)
        if not file.keys:
            del self._files[path]
            self.num_bytes -= file.num_bytes
            path.unlink(missing_ok=True)

    def recover(self) -> list[Trajectory]:
        """What earlier attempts on this node left; damaged files are removed and named."""
        if self._directory is None:
            return []
        found: list[Trajectory] = []
        for path in sorted(self._directory.glob(f"*{SUFFIX}")):
            try:
                data = path.read_bytes()
                trajectories = _decode(data)
            except DAMAGE as err:
                log.warning("spool: %s is damaged (%s) and was removed", path.name, err)
                path.unlink(missing_ok=True)
                continue
            self._keep(path, trajectories, num_bytes=len(data))
            found += trajectories
        for torn in self._directory.glob("*.tmp"):
            torn.unlink(missing_ok=True)
        return found

    def close(self) -> None:
        """Removes the directory if nothing is left in it."""
        if self._directory is not None and not self._files:
            with contextlib.suppress(OSError):
                self._directory.rmdir()

    def _keep(self, path: Path, trajectories: Sequence[Trajectory], *, num_bytes: int) -> None:
        keys = {trajectory.key for trajectory in trajectories}
        for key in keys:
            self.remove(key)  # an older copy
        self._files[path] = _File(keys=keys, num_bytes=num_bytes)
        self._places |= dict.fromkeys(keys, path)
        self.num_bytes += num_bytes

    def _path(self, key: tuple[int, int]) -> Path:
        """A name that no file of ours has: one of these may still hold others' only copy."""
        assert self._directory is not None
        path, number = self._directory / f"{key[0]}-{key[1]}{SUFFIX}", 0
        while path in self._files:
            number += 1
            path = self._directory / f"{key[0]}-{key[1]}-{number}{SUFFIX}"
        return path

    def _give_up(self, err: OSError) -> None:
        self._warn(f"spool: {err}; trajectories are kept in memory")
        self._directory = None

    def _warn(self, message: str) -> None:
        if not self._warned:
            log.warning("%s", message)
        self._warned = True


def _encode(trajectories: Sequence[Trajectory]) -> list[frames.Frame]:
    push, arrays = frames.encode_push(trajectories)
    parts = [msgspec.msgpack.encode(push), *arrays]
    lengths = [_NUMBER.pack(number) for number in (len(parts), *(len(part) for part in parts))]
    return [MAGIC + b"".join(lengths), *parts]


def _decode(data: bytes) -> list[Trajectory]:
    if data.startswith(FLAT_MAGIC):
        return _decode_flat(data)
    if not data.startswith(MAGIC):
        raise ValueError("not a spool file of this format")
    at = len(MAGIC)
    (count,) = _NUMBER.unpack_from(data, at)
    if count > MAX_PARTS:
        raise ValueError(f"{count} parts")
    lengths = struct.unpack_from(f"<{count}Q", data, at + _NUMBER.size)
    head, *arrays = _parts(data, lengths, start=at + (1 + count) * _NUMBER.size)
    push = msgspec.msgpack.decode(head, type=Push)
    return [parcel.trajectory() for parcel in frames.decode_push(push, arrays)]


def _decode_flat(data: bytes) -> list[Trajectory]:
    """What an earlier version on this node left."""
    lengths = _FLAT_LENGTHS.unpack_from(data, len(FLAT_MAGIC))
    head, *arrays = _parts(data, lengths, start=len(FLAT_MAGIC) + _FLAT_LENGTHS.size)
    rows = msgspec.msgpack.decode(head, type=Push).rows
    total = sum(row.length for row in rows)
    flat = [
        np.frombuffer(part, dtype=dtype, count=total)
        for part, dtype in zip(arrays, ("<i4", "<f4", "u1", "<i4"), strict=True)
    ]
    found, start = [], 0
    for row in rows:
        stop = start + row.length
        tokens, logprobs, loss_mask, versions = (values[start:stop] for values in flat)
        start = stop
        fields = msgspec.structs.asdict(row)
        for name in ("length", "num_logprobs", "num_runs"):
            del fields[name]
        fields |= {"kind": Kind(row.kind), "outcome": Outcome(row.outcome)}
        trajectory = Trajectory(
            tokens=tokens, logprobs=logprobs, loss_mask=loss_mask, versions=versions, **fields
        )
        found.append(trajectory.check())
    return found


def _parts(data: bytes, lengths: Sequence[int], *, start: int) -> list[memoryview]:
    if start + sum(lengths) != len(data):
        raise ValueError(f"{len(data)} bytes where {start + sum(lengths)} were written")
    parts = []
    for length in lengths:
        parts.append(memoryview(data)[start : start + length])
        start += length
    return parts
