"""Inference jobs of their own on this machine: servers are killed, join and leave under a run."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prorl_hpc.inference.announce import read_all
from prorl_hpc.observe.metrics import read_metrics
from tests.prorl_hpc.run_helpers import Session

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800)]

STEPS = 14
DETERMINISTIC = [
    f"steps={STEPS}",
    "learner.deterministic=true",
    "algorithm.max_staleness=0",
    "rollout.engine.max_batch=4",
]
OWN_JOBS = [
    "inference.placement=own_jobs",
    "inference.nodes=2",
    "inference.cpus_per_node=1",
    "inference.memory_mib=1024",
    "inference.walltime_minutes=30",
]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Session, Session]]:
    sessions = (
        Session(runs=tmp_path, name="nodes", overrides=DETERMINISTIC),
        Session(runs=tmp_path, name="served", overrides=[*DETERMINISTIC, *OWN_JOBS]),
    )
    yield sessions
    for session in sessions:
        session.end()


def test_servers_that_die_join_and_leave_change_nothing_of_what_is_learned(
    pair: tuple[Session, Session],
) -> None:
    """The same weights as a run whose nodes have engines of their own and that nobody disturbs."""
    nodes, served = pair
    served.submit()
    served.wait_step(2)
    served.kill("inference", 0)
    with _learner_held(served):
        served.cli("scale", served.name, "--inference", "3")
        served.wait(
            lambda: any(one.index == 2 for one in read_all(served.run)), what="server 2 serves"
        )
    served.wait_step(served.step + 1)
    served.kill("inference", 1, whole=True)
    served.wait_step(served.step + 2)
    with _learner_held(served):
        served.cli("scale", served.name, "--inference", "2")
        served.wait(
            lambda: any(end.index == 2 for end in served.ends("inference")), what="server 2 leaves"
        )
    assert "inference: " in served.cli("status", served.name).stdout
    found = json.loads(served.cli("status", served.name, "--json").stdout)["jobs"]
    assert [job["index"] for job in found if job["job"] == "inference"] == [0, 1, 2]
    served.wait_end()
    served.audit(steps=STEPS, batch_groups=4)
    for index in (0, 1):
        ends = [end for end in served.ends("inference") if end.index == index]
        assert ends[-1].next in ("finished", "cancelled"), served.said()
        assert len(ends) >= 2
    assert read_all(served.run) == []
    for index in (0, 1):
        rows = read_metrics(served.run.metrics("rollout", index=index))
        # A lost server's requests are made elsewhere: no rollout fails for it.
        assert all("infrastructure_failure" not in row["outcomes"] for row in rows)
    nodes.submit("--wait")
    assert nodes.weights() == served.weights()


@contextmanager
def _learner_held(session: Session) -> Iterator[None]:
    """The learner stands still meanwhile, so that the run can't end before what is waited for."""
    pids = session.wait_processes("learner")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
