"""Inside a job: the environment as a value, the stop flag, the cores."""

import os
import signal
from pathlib import Path

import pytest

from hpc.allocation import Allocation, StopFlag, cpu_count
from hpc.errors import PlanError

VARIABLES = {
    "PRORL_RUN_DIR": "/runs/r1",
    "PRORL_JOB": "rollout",
    "PRORL_ROLE": "rollout",
    "PRORL_INDEX": "7",
    "PRORL_ATTEMPT": "2",
    "PRORL_JOB_ID": "12_7",
    "PRORL_DEADLINE": "5000",
    "PRORL_GRACE_SECONDS": "120",
    "PRORL_SCRATCH": "/tmp/s",
}


def test_from_environment() -> None:
    found = Allocation.from_environment(VARIABLES)
    assert (found.role, found.index, found.attempt, found.node_rank) == ("rollout", 7, 2, 0)
    assert found.num_nodes == 1
    assert found.seconds_left(4000.0) == 1000.0
    multi = Allocation.from_environment(
        {**VARIABLES, "SLURM_JOB_NODELIST": "gpu7", "SLURM_NODEID": "3", "PRORL_DEADLINE": ""}
    )
    assert multi.hosts == ("gpu7",)
    assert multi.node_rank == 3
    assert multi.seconds_left(0.0) == float("inf")


def test_missing_variables() -> None:
    with pytest.raises(PlanError, match="PRORL_RUN_DIR"):
        Allocation.from_environment({})


def test_progress(tmp_path: Path) -> None:
    found = Allocation.from_environment({**VARIABLES, "PRORL_RUN_DIR": str(tmp_path)})
    found.record_progress(12)
    assert float(found.run.progress("rollout", index=7).read_text()) == 12.0


def test_stop_flag_keeps_the_first_reason() -> None:
    flag = StopFlag()
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    try:
        flag.install()
        assert not flag.stopping
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.stopping
        assert flag.reason == "the walltime is near"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_stop_flag_knows_the_walltime() -> None:
    assert StopFlag(deadline=1.0, grace_seconds=5).reason == "the walltime is near"
    assert not StopFlag(deadline=None).stopping
    assert StopFlag(deadline=100.0).seconds_left(40.0) == 60.0


def test_cpu_count_respects_cgroups(tmp_path: Path) -> None:
    assert cpu_count(cgroup=tmp_path) == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu,cpuacct").symlink_to("cpu")
    assert cpu_count(cgroup=tmp_path) == 1
