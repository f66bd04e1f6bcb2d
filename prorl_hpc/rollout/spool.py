"""Finished trajectories on node-local disk until the buffer has them. Knows no socket.

One file per trajectory, in the layout of a push. It survives a killed worker, so that the next
attempt on this node hands in what the last one couldn't. A full disk is no error: what can't be
spooled lives in memory alone.
"""

import contextlib
import logging
import struct
from pathlib import Path

import msgspec

from prorl_hpc.buffer import frames
from prorl_hpc.buffer.messages import Push, WireError
from prorl_hpc.records import Trajectory

log = logging.getLogger("prorl_hpc.rollout")

MAGIC = b"PRLSPL1\n"
_LENGTHS = struct.Struct("<5Q")
SUFFIX = ".trajectory"


class Spool:
    """A directory of trajectories that aren't acked yet; without one it keeps nothing."""

    def __init__(self, directory: Path | None, *, limit_bytes: int) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._sizes: dict[tuple[int, int], int] = {}
        self._warned = False
        if directory is not None:
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as err:
                self._give_up(err)

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def put(self, trajectory: Trajectory) -> bool:
        """Keeps a copy; False when there is no room or no disk."""
        if self._directory is None:
            return False
        data = _encode(trajectory)
        if self.num_bytes + len(data) > self._limit_bytes:
            return False
        path = self._path(trajectory.key)
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_bytes(data)
            temporary.rename(path)
        except OSError as err:
            temporary.unlink(missing_ok=True)
            self._warn(f"spool: {err}; trajectories are kept in memory")
            return False
        self._sizes[trajectory.key] = len(data)
        return True

    def remove(self, key: tuple[int, int]) -> None:
        """The buffer has it."""
        if self._sizes.pop(key, None) is not None:
            self._path(key).unlink(missing_ok=True)

    def recover(self) -> list[Trajectory]:
        """What earlier attempts on this node left; damaged files are removed and named."""
        if self._directory is None:
            return []
        found = []
        for path in sorted(self._directory.glob(f"*{SUFFIX}")):
            try:
                data = path.read_bytes()
                trajectory = _decode(data)
            except (OSError, ValueError, WireError, msgspec.MsgspecError, struct.error) as err:
                log.warning("spool: %s is damaged (%s) and was removed", path.name, err)
                path.unlink(missing_ok=True)
                continue
            self._sizes[trajectory.key] = len(data)
            found.append(trajectory)
        for torn in self._directory.glob("*.tmp"):
            torn.unlink(missing_ok=True)
        return found

    def close(self) -> None:
        """Removes the directory if nothing is left in it."""
        if self._directory is not None and not self._sizes:
            with contextlib.suppress(OSError):
                self._directory.rmdir()

    def _path(self, key: tuple[int, int]) -> Path:
        assert self._directory is not None
        return self._directory / f"{key[0]}-{key[1]}{SUFFIX}"

    def _give_up(self, err: OSError) -> None:
        self._warn(f"spool: {err}; trajectories are kept in memory")
        self._directory = None

    def _warn(self, message: str) -> None:
        if not self._warned:
            log.warning("%s", message)
        self._warned = True


def _encode(trajectory: Trajectory) -> bytes:
    push, arrays = frames.encode_push([trajectory])
    parts = [msgspec.msgpack.encode(push), *arrays]
    return b"".join([MAGIC, _LENGTHS.pack(*(len(part) for part in parts)), *parts])


def _decode(data: bytes) -> Trajectory:
    if not data.startswith(MAGIC):
        raise ValueError("not a spool file of this format")
    start = len(MAGIC) + _LENGTHS.size
    parts = []
    for length in _LENGTHS.unpack_from(data, len(MAGIC)):
        parts.append(data[start : start + length])
        start += length
    if start != len(data):
        raise ValueError(f"{len(data)} bytes where {start} were written")
    push = msgspec.msgpack.decode(parts[0], type=Push)
    (trajectory,) = frames.decode_push(push, parts[1:])
    return trajectory
