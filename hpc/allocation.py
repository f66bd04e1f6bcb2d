"""Inside a job: who am I, on which nodes, until when; and the flag that says stop.

Reads the environment that the job's script made. Starts nothing, submits nothing.
"""

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hpc import slurm
from hpc.errors import PlanError
from hpc.rundir import RunDirectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The place of this process in its run."""

    run_directory: Path
    job: str
    role: str
    index: int
    attempt: int
    job_id: str
    deadline: float | None
    """Unix seconds at which the walltime ends; None where there is none."""
    grace_seconds: int
    scratch: Path
    """Node-local directory of this attempt; removed when the attempt ends."""
    node_rank: int
    hosts: tuple[str, ...]
    """Host names of all nodes of the job, by node rank."""

    @property
    def num_nodes(self) -> int:
        return len(self.hosts)

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.run_directory)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "Allocation":
        """Raises PlanError where the script's variables are missing or damaged."""
        given = os.environ if environment is None else environment
        try:
            deadline = given.get("PRORL_DEADLINE", "")
            return cls(
                run_directory=Path(given["PRORL_RUN_DIR"]),
                job=given["PRORL_JOB"],
                role=given["PRORL_ROLE"],
                index=int(given["PRORL_INDEX"]),
                attempt=int(given["PRORL_ATTEMPT"]),
                job_id=given.get("PRORL_JOB_ID", ""),
                deadline=float(deadline) if deadline else None,
                grace_seconds=int(given.get("PRORL_GRACE_SECONDS", "0")),
                scratch=Path(given["PRORL_SCRATCH"]),
                node_rank=int(given.get("SLURM_NODEID", "0")),
                hosts=_hosts(given),
            )
        except (KeyError, ValueError) as err:
            raise PlanError(
                f"not inside a job of prorl-hpc ({err} is missing or wrong); start the job through "
                "its script"
            ) from err

    def seconds_left(self, now: float) -> float:
        """Seconds until the walltime ends (Unix time `now`); infinite without a deadline."""
        return float("inf") if self.deadline is None else self.deadline - now

    def record_progress(self, value: float) -> None:
        """Writes the role's progress: a chain of attempts goes on as long as it grows."""
        path = self.run.progress(self.role, index=self.index)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(f"{value}\n")
        temporary.rename(path)


def _hosts(environment: Mapping[str, str]) -> tuple[str, ...]:
    nodes = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    return slurm.hostnames(nodes) if nodes else (os.uname().nodename,)


class StopFlag:
    """Set by SIGTERM, SIGUSR2 (Slurm's warning) and SIGINT, or when the walltime comes near.

    Safe to use in signal handlers: it only stores the reason. Code that waits looks at it between
    bounded waits; asyncio code may pass `stop` to `loop.add_signal_handler` instead of `install`.
    """

    def __init__(self, *, deadline: float | None = None, grace_seconds: float = 0.0) -> None:
        self._deadline = deadline
        self._grace_seconds = grace_seconds
        self._reason = ""

    @classmethod
    def of(cls, allocation: Allocation) -> "StopFlag":
        """A flag that also rises when the grace time before the walltime begins."""
        return cls(deadline=allocation.deadline, grace_seconds=allocation.grace_seconds)

    def install(self) -> "StopFlag":
        """Catches the signals; main thread only."""
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._caught)
        return self

    def stop(self, reason: str) -> None:
        """Asks for the end; the first reason stays."""
        self._reason = self._reason or reason

    def _caught(self, number: int, _frame: FrameType | None) -> None:
        warning = number == signal.SIGUSR2
        self.stop("the walltime is near" if warning else f"got {signal.Signals(number).name}")

    @property
    def reason(self) -> str:
        """Why to stop; empty while there is no cause."""
        if not self._reason and self.seconds_left(time.time()) <= self._grace_seconds:
            self._reason = "the walltime is near"
        return self._reason

    @property
    def stopping(self) -> bool:
        return bool(self.reason)

    def seconds_left(self, now: float) -> float:
        """Seconds until the walltime ends (Unix time `now`); infinite without a deadline."""
        return float("inf") if self._deadline is None else self._deadline - now


def cpu_count(*, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its affinity, or fewer where a cgroup limits the time."""
    allowed = len(os.sched_getaffinity(0))
    quota = _quota(cgroup)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def _quota(root: Path) -> float | None:
    """CPU time per time that the nearest limiting cgroup (v2, else v1) allows."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        directory = base / path.lstrip("/")
        while True:
            quotas.append(_read_v1(directory) if controllers else _read_v2(directory))
            if directory in (base, directory.parent):
                break
            directory = directory.parent
    return min((quota for quota in quotas if quota is not None), default=None)


def _read_v2(directory: Path) -> float | None:
    try:
        quota, period = (directory / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _read_v1(directory: Path) -> float | None:
    try:
        quota = int((directory / "cpu.cfs_quota_us").read_text())
        period = int((directory / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return None if quota <= 0 else quota / period
