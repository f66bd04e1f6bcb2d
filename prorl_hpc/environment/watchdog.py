"""Measures what an environment uses and says what it exceeds. Stops nothing itself.

Knows memory, processes, disk and clocks; the judgement is pure.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.environment.base import EndReason, Limits, Stop

FREE_BYTES_FLOOR = 256 << 20
"""Below this the disk is full for the neighbours too."""

MAX_ENTRIES = 500_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """One measurement."""

    resident_bytes: int
    num_processes: int
    disk_bytes: int | None
    """None between two measurements: an old one must not stop what came after it."""
    free_bytes: int
    """Left on the scratch's file system."""


def judge(usage: Usage, *, limits: Limits, num_disk_stops: int = 0) -> Stop | None:
    """The limit that is exceeded, if any.

    After a stop for disk the files are still there: each stop allows a tenth more, so that the
    agent can clean up.
    """
    if usage.resident_bytes > limits.memory_bytes:
        return Stop.memory
    if usage.num_processes > limits.num_processes:
        return Stop.processes
    if usage.disk_bytes is None:
        return None
    allowed = limits.disk_bytes * (10 + num_disk_stops) // 10
    floor = FREE_BYTES_FLOOR // (1 + num_disk_stops)
    # a disk that others filled is not this environment's doing
    if usage.disk_bytes > allowed or (usage.free_bytes < floor < usage.disk_bytes):
        return Stop.disk
    return None


def expired(
    *, now: float, started: float, last_used: float | None, limits: Limits
) -> EndReason | None:
    """Whether the environment is over; `last_used` is None while a command runs."""
    if now - started > limits.wall_seconds:
        return EndReason.wall
    if last_used is not None and now - last_used > limits.idle_seconds:
        return EndReason.idle
    return None


class DiskMeter:
    """Bytes below a directory, measured seldom enough to cost little."""

    def __init__(self, path: Path, *, period_seconds: float = 2.0) -> None:
        self._path = path
        self._period_seconds = period_seconds
        self._next = float("-inf")

    def read(self, now: float) -> tuple[int | None, int]:
        """(bytes used when it is time to measure, bytes free). Blocks while it walks."""
        used = None
        if now >= self._next:
            began = time.monotonic()
            used = tree_bytes(self._path)
            # a large tree is walked less often: at most a tenth of the time
            self._next = now + max(self._period_seconds, 10 * (time.monotonic() - began))
        free = os.statvfs(self._path)
        return used, free.f_bavail * free.f_frsize


def tree_bytes(path: Path) -> int:
    """Allocated bytes below `path`; what can't be read counts nothing."""
    total, entries, pending = 0, 0, [str(path)]
    while pending and entries < MAX_ENTRIES:
        try:
            with os.scandir(pending.pop()) as directory:
                for entry in directory:
                    entries += 1
                    try:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
                    except OSError:
                        continue
        except OSError:
            continue
    return total
