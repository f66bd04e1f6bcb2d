"""Inference jobs of their own on a real Slurm: GPU jobs that serve CPU rollout nodes.

The engine is the one for CPUs; the GPUs are only counted.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from prorl_hpc.inference.announce import read_all
from prorl_hpc.observe.metrics import read_metrics
from tests.cluster.test_run import HOSTILE, ClusterSession

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

STEPS = 40
OVERRIDES = [
    f"steps={STEPS}",
    "inference.placement=own_jobs",
    "inference.nodes=2",
    "inference.cpus_per_node=1",
    "inference.gpus_per_node=1",
    "inference.memory_mib=4000",
    "inference.walltime_minutes=30",
]


@pytest.fixture
def session(cluster: Any) -> Iterator[ClusterSession]:
    base = cluster.user.new_directory("run") / HOSTILE
    made = ClusterSession(cluster=cluster, runs=base, name="served", overrides=OVERRIDES)
    yield made
    roles = ("buffer", "inference", "rollout", "learner")
    ids = [start.job_id for role in roles for start in made.starts(role)]
    if ids:
        cluster.run(["scancel", "--quiet", *ids])


def test_servers_are_requeued_and_added_without_losing_a_rollout(session: ClusterSession) -> None:
    run, cluster = session.run, session.cluster
    session.submit()
    session.wait(lambda: len(read_all(run)) == 2, what="both servers are announced")
    session.wait_step(2)
    first = next(start for start in session.starts("inference") if start.index == 0)
    job = cluster.job(first.job_id)
    assert job["Partition"] == "gpu"
    assert "gpu" in job["TresPerNode"]
    assert all(
        cluster.job(s.job_id)["Partition"] == "preemptible" for s in session.starts("rollout")
    )

    done = cluster.run(["scontrol", "requeue", first.job_id])
    assert done.returncode == 0, done.stderr
    assert "3 inference nodes" in session.cli("scale", session.name, "--inference", "3").stdout
    session.wait(
        lambda: (
            {(s.index, s.attempt) for s in session.starts("inference")}
            >= {(0, 1), (0, 2), (1, 1), (2, 1)}
        ),
        what="the requeued server and the new one start",
    )
    session.wait_all()
    session.wait(
        lambda: sum(end.next == "finished" for end in session.ends("inference")) == 3,
        what="the servers see that the run is finished",
    )
    session.audit(steps=STEPS, batch_groups=4)
    assert len(session.starts("buffer")) == len(session.starts("learner")) == 1
    assert read_all(run) == []
    for index in (0, 1):
        rows = read_metrics(run.metrics("rollout", index=index))
        assert all("infrastructure_failure" not in row["outcomes"] for row in rows)
    assert "inference" in session.cli("status", session.name).stdout
