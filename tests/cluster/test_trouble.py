"""What Slurm may do to a run: not answer, forget its jobs, give a node that lacks something."""

from collections.abc import Iterator
from typing import Any

import pytest

from hpc import ledger
from tests.cluster.jobs import Session, job, open_session

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


@pytest.fixture
def session(cluster: Any) -> Iterator[Session]:
    yield from open_session(cluster)


@pytest.fixture
def counted(cluster_with_accounting: Any) -> Iterator[Session]:
    yield from open_session(cluster_with_accounting)


def test_a_controller_that_does_not_answer(session: Session) -> None:
    session.launch(job(session, "learner", "wait"))
    session.wait(lambda: session.starts("learner") == 1, what="the job starts")
    etc = session.cluster.prefix / "etc"
    # The same cluster, as it looks to a login node that nobody answers.
    change = "sed 's/^SlurmctldPort=.*/SlurmctldPort=1/' slurm.conf > away.conf"
    made = session.cluster.run(["bash", "-c", f"cd {etc} && {change}"], as_user=False)
    assert made.returncode == 0, made.stderr
    away = {"SLURM_CONF": str(etc / "away.conf")}
    (state,) = session.states(env=away)
    assert state["phase"] == "unknown"
    assert state["reason"].startswith("squeue failed: ")
    assert "no record of its end; last output" in state["reason"]
    with pytest.raises(AssertionError, match="Unable to contact slurm controller"):
        session.drive("resume", env=away)
    assert len(session.entries(ledger.Submit)) == 1
    (state,) = session.states()
    assert state["phase"] == "running"
    session.finish()
    session.wait(lambda: session.ends("learner", "finished") == 1, what="the job ends")
    # The ledger knows that without any controller.
    assert [state["phase"] for state in session.states(env=away)] == ["finished"]


def test_jobs_that_the_controller_has_forgotten(counted: Session) -> None:
    buffer = job(counted, "buffer", "wait")
    never = job(counted, "learner", "wait", after=("buffer",), nodes=3, cpus=16)
    counted.launch(buffer, never, accounting=True)
    counted.wait(lambda: counted.starts("buffer") == 1, what="the buffer starts")
    (learner,) = (e.job_id for e in counted.entries(ledger.Submit) if e.job == "learner")
    cluster = counted.cluster
    assert cluster.run(["scancel", learner]).returncode == 0  # before it could start
    counted.finish()
    counted.wait(lambda: counted.ends("buffer", "finished") == 1, what="the buffer ends")
    counted.wait(
        lambda: not cluster.run(["squeue", "-h", "-a", "-t", "all"]).stdout.strip(),
        what="the controller forgets both",
    )
    counted.wait(
        lambda: {state["job"]: state["phase"] for state in counted.states()}
        == {"buffer": "finished", "learner": "cancelled"},
        what="accounting has heard of both",
    )  # fmt: skip


def test_a_node_that_lacks_something_is_left(session: Session) -> None:
    # Fails on the first node that comes here, as a module that only that one hasn't.
    line = 'mkdir -p out; [ -e out/bad ] || { echo "$SLURMD_NODENAME" > out/bad; false; }'
    session.launch(job(session, "rollout", "once", array_size=1), setup=(line,))
    session.wait(lambda: session.ends("rollout", "finished") == 1, what="the task ends elsewhere")
    bad = (session.run.root / "out" / "bad").read_text().strip()
    first, second = session.entries(ledger.Start)
    assert (first.host, first.attempt, second.attempt) == (bad, 1, 2)
    assert second.host != bad
    (refusal,) = (end for end in session.entries(ledger.Exit) if end.next == "again")
    assert refusal.reason.startswith(f"site.setup failed on {bad}: mkdir -p out; ")
    session.wait(
        lambda: [state["phase"] for state in session.states()] == ["finished"], what="states agree"
    )
