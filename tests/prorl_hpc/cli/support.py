"""A recipe directory with a site of its own, so that tests depend on no shipped site; and values
that tests of commands share."""

from pathlib import Path

import numpy as np

from hpc.status import JobState, Phase
from prorl_hpc.records import Kind, Outcome, Trajectory

SITE = """\
# @package site
name: desk
backend: local
cpus: 2
placements:
  default:
    partition: desk
    max_nodes: 4
    max_walltime_minutes: 120
    cpus_per_node: 4
    memory_mib: 16384
max_node_hours: 100.0
"""


def recipe_directory(path: Path) -> Path:
    """Makes `path` with the site `desk`."""
    (path / "site").mkdir(parents=True)
    (path / "site" / "desk.yaml").write_text(SITE)
    return path


def state(job: str, phase: Phase, *, index: int = 0) -> JobState:
    return JobState(
        job=job, role=job, index=index, phase=phase, reason="", job_id="1", attempt=1, host="h",
        started=0.0, ended=None,
    )  # fmt: skip


def trajectory(reward: float | None, *, group: int = 0, index: int = 0) -> Trajectory:
    failed = reward is None
    return Trajectory(
        group_id=group,
        rollout_index=index,
        kind=Kind.validation,
        task="a",
        instance_id=f"a-{group}",
        tokens=np.array([5, 6, 7, 8], dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1], dtype=np.uint8),
        logprobs=np.zeros(4, dtype=np.float32),
        versions=np.array([-1, -1, 3, 3], dtype=np.int32),
        reward=reward,
        outcome=Outcome.infrastructure_failure if failed else Outcome.scored,
    )
