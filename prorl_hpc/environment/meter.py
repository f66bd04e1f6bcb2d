"""What one environment uses, measured, and the limit that it exceeds. Stops nothing itself.

Remembers what a judgement needs of the ones before it: stops for disk, and kills by the kernel.
"""

from collections.abc import Sequence
from pathlib import Path

from hpc.cgroups import num_oom_kills
from prorl_hpc.environment import watchdog
from prorl_hpc.environment.base import Limits, Stop
from prorl_hpc.environment.tree import SandboxTree, SharedSnapshot, resident_bytes


class Meter:
    """Of one environment, from its start to its end."""

    def __init__(
        self, scratch: Path, *, limits: Limits, groups: Sequence[Path], snapshot: SharedSnapshot
    ) -> None:
        self._disk = watchdog.DiskMeter(scratch)
        self._limits = limits
        self._groups = groups
        self._snapshot = snapshot
        self._num_disk_stops = 0
        self._num_oom_kills = 0

    def judge(self, tree: SandboxTree, *, now: float, busy: bool) -> Stop | None:
        """The limit that is exceeded now, if any. Blocking."""
        table = self._snapshot.get()
        pids = tree.payload(table)
        used, free = self._disk.read(now)
        usage = watchdog.Usage(
            resident_bytes=resident_bytes(table, pids), num_processes=len(pids),
            disk_bytes=used, free_bytes=free,
        )  # fmt: skip
        stop = watchdog.judge(usage, limits=self._limits, num_disk_stops=self._num_disk_stops)
        if stop is None and busy and self.oom_killed():
            stop = Stop.memory  # what the kernel left of the command is of no use
        self._num_disk_stops += stop is Stop.disk
        return stop

    def oom_killed(self) -> bool:
        """Whether the kernel killed something for the memory limit since this was last asked."""
        if not self._groups:
            return False
        before, self._num_oom_kills = self._num_oom_kills, num_oom_kills(self._groups)
        return self._num_oom_kills > before
