"""Inference jobs of their own on this machine: servers are killed, join and leave under a run."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_hpc.inference.announce import read_all
from prorl_hpc.observe.metrics import read_metrics
from tests.prorl_hpc.run_helpers import Session

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800)]

STEPS = 36
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
    served.cli("scale", served.name, "--inference", "3")
    _wait_announced(served, 2)
    served.kill("inference", 1, whole=True)
    served.wait_step(served.step + 2)
    served.cli("scale", served.name, "--inference", "2")
    served.wait(lambda: served.ends("inference")[-1].index == 2, what="server 2 leaves")
    assert "inference: " in served.cli("status", served.name).stdout
    found = json.loads(served.cli("status", served.name, "--json").stdout)["jobs"]
    assert [job["index"] for job in found if job["job"] == "inference"] == [0, 1, 2]
    served.wait_end()
    served.audit(steps=STEPS, batch_groups=4)
    for index in (0, 1):
        ends = [end for end in served.ends("inference") if end.index == index]
        assert ends[-1].next == "finished", served.said()
        assert len(ends) >= 2
    assert read_all(served.run) == []
    for index in (0, 1):
        rows = read_metrics(served.run.metrics("rollout", index=index))
        # A lost server's requests are made elsewhere: no rollout fails for it.
        assert all("infrastructure_failure" not in row["outcomes"] for row in rows)
    assert sum(_last(served, index, "servers_lost") for index in (0, 1)) >= 2
    nodes.submit("--wait")
    assert nodes.weights() == served.weights()


def _last(session: Session, index: int, key: str) -> int:
    value = read_metrics(session.run.metrics("rollout", index=index))[-1][key]
    assert isinstance(value, int)
    return value


def _wait_announced(session: Session, index: int) -> None:
    session.wait(
        lambda: any(one.index == index for one in read_all(session.run)),
        what=f"inference {index} is announced",
    )
