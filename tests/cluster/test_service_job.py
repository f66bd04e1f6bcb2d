"""The rollout service as a job of a real Slurm: it answers, comes back, is cancelled."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc import ledger
from hpc.rundir import RunDirectory
from prorl_hpc.service.client import RolloutClient
from tests.cluster.conftest import poll
from tests.prorl_hpc.run_helpers import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

DEADLINE_SECONDS = 400.0
PYTHON = str(ROOT / ".venv/bin/python")
MAKE_POLICY = """
import sys
from pathlib import Path
from prorl_hpc.run import Run
from tests.fakes.tiny_model import publish_tiny
publish_tiny(Run(Path(sys.argv[1])), version=7)
"""
RECIPE = [
    "recipe=quickstart",
    "task=chain_sum",
    "site=minicluster",
    "rollout.max_new_tokens=4",
    "rollout.cpus_per_node=1",
    "rollout.memory_mib=6000",
    "rollout.walltime_minutes=30",
]


class Service:
    """One service of the cluster's user, driven by the command line and the client."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        base = cluster.user.new_directory("service")
        self.directory = base / "chat"
        self.run = RunDirectory(self.directory)
        made = cluster.user.run([PYTHON, "-c", MAKE_POLICY, str(base / "made")], cwd=ROOT)
        assert made.returncode == 0, made.stderr
        self.policy = base / "made" / "policy" / "v00000007"

    def cli(self, *arguments: str) -> str:
        done = self.cluster.run([PYTHON, "-m", "prorl_hpc.cli", *arguments], cwd=ROOT, timeout=300)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return str(done.stdout)

    def serve(self) -> str:
        where = ["--policy", str(self.policy), "--dir", str(self.directory), "--submit"]
        return self.cli("serve", *RECIPE, *where)

    @property
    def starts(self) -> list[ledger.Start]:
        entries = ledger.read(self.run.ledger).entries
        return [entry for entry in entries if isinstance(entry, ledger.Start)]


@pytest.fixture
def service(cluster: Any) -> Iterator[Service]:
    made = Service(cluster)
    yield made
    if ids := [start.job_id for start in made.starts]:
        cluster.run(["scancel", "--quiet", *ids])


def test_a_service_answers_is_requeued_and_cancelled(service: Service) -> None:
    cluster, directory = service.cluster, Path(service.directory)
    assert "service.json" in service.serve()
    service.serve()  # twice starts nothing twice
    with RolloutClient.at(directory, patience_seconds=DEADLINE_SECONDS) as client:
        (task,) = client.tasks()
        assert task["name"] == "chain_sum"
        job = client.submit(task="chain_sum", index=3, num_samples=2, idempotency_key="once")
        first = client.result(job, timeout_seconds=DEADLINE_SECONDS)
        assert len(first["samples"]) == 2
        for sample in first["samples"]:
            assert sample["reward"] is not None
            sampled = [v for v, own in zip(sample["versions"], sample["loss_mask"], strict=True)
                       if own]  # fmt: skip
            assert set(sampled) == {7}
        (start,) = service.starts
        assert cluster.job(start.job_id)["Partition"] == "preemptible"
        assert "running" in service.cli("status", str(directory))

        # Preempted, say: the next attempt has the job and its result, on a port of its own.
        done = cluster.run(["scontrol", "requeue", start.job_id])
        assert done.returncode == 0, done.stderr
        poll(lambda: len(service.starts) == 2, what="it starts again", timeout=DEADLINE_SECONDS)
        again = client.submit(task="chain_sum", index=3, num_samples=2, idempotency_key="once")
        assert again == job
        assert client.result(job, timeout_seconds=DEADLINE_SECONDS) == first
        more = client.rollouts(task="chain_sum", index=4, num_samples=1)
        assert len(more) == 1
    service.cli("cancel", str(directory))
    cluster.wait_for(service.starts[-1].job_id, "CANCELLED", "COMPLETED", "FAILED")
    assert "cancelled" in service.cli("status", str(directory))
