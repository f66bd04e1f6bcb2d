"""Jobs on a real Slurm, as an ordinary user: chunks, chains, preemption, lost nodes, cancelling.

The jobs are a small program, not the pipeline. Every run directory has a hostile name.
"""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpc import ledger
from hpc.site import Backend, OnPreempt, Placement, Site
from tests.cluster.jobs import HOSTILE, Session, job, open_session

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


@pytest.fixture
def session(cluster: Any) -> Iterator[Session]:
    yield from open_session(cluster)


def test_array_above_max_array_size(session: Session) -> None:
    size = session.cluster.max_array_size + 3
    environment = (("HOSTILE", HOSTILE),)
    session.launch(
        job(session, "rollout", "once", array_size=size, array_limit=24, environment=environment)
    )
    session.wait(
        lambda: session.ends("rollout", "finished") >= size, what="all tasks end", timeout=700
    )
    submits = session.entries(ledger.Submit)
    assert [entry.index_offset for entry in submits] == [0, session.cluster.max_array_size]
    indexes = sorted(entry.index for entry in session.entries(ledger.Start))
    assert indexes == list(range(size))
    written = session.written(f"rollout-{size - 1}.1.0")
    assert written["HOSTILE"] == HOSTILE
    assert written["PRORL_DEADLINE"].isdigit()
    session.wait(
        lambda: {state["phase"] for state in session.states()} == {"finished"}, what="states agree"
    )


def test_preempted_tasks_come_back(session: Session) -> None:
    tasks = job(session, "rollout", "wait", array_size=2, cpus=16)
    session.launch(tasks, rollout=Placement(partition="preemptible"))
    session.wait(lambda: session.starts("rollout") == 2, what="both tasks start")
    urgent = ("--partition=urgent", "--nodes=3", "--exclusive", "--time=5", "--mem=100")
    session.cluster.sbatch("sleep 2", *urgent, cwd=Path("/tmp"))
    session.wait(lambda: session.starts("rollout") == 4, what="both tasks come back")
    session.finish()
    session.wait(lambda: session.ends("rollout", "finished") == 2, what="both tasks end")
    for index in (0, 1):
        logs = session.run.job_logs("rollout", index=index)
        assert {path.name for path in logs.glob("attempt-*")} == {"attempt-1", "attempt-2"}


def test_preempted_tasks_submit_themselves_again_where_slurm_cancels(session: Session) -> None:
    change = ["scontrol", "update", "PartitionName=preemptible"]
    done = session.cluster.run([*change, "PreemptMode=CANCEL"], as_user=False)
    assert done.returncode == 0, done.stderr
    try:
        tasks = job(session, "rollout", "wait", array_size=2, cpus=16)
        place = Placement(partition="preemptible", on_preempt=OnPreempt.cancel)
        session.launch(tasks, rollout=place)
        session.wait(lambda: session.starts("rollout") == 2, what="both tasks start")
        urgent = ("--partition=urgent", "--nodes=3", "--exclusive", "--time=5", "--mem=100")
        session.cluster.sbatch("sleep 2", *urgent, cwd=Path("/tmp"))
        session.wait(lambda: session.starts("rollout") == 4, what="both tasks come back")
    finally:
        session.cluster.run([*change, "PreemptMode=REQUEUE"], as_user=False)
    assert len(session.entries(ledger.Requeue)) == 2
    session.finish()
    session.wait(
        lambda: {state["phase"] for state in session.states()} == {"finished"}, what="all finished"
    )


def test_chain_over_walltimes(session: Session) -> None:
    # Slurm warns 10 s after the start, or earlier: on a busy machine before the program has said
    # how it takes the warning, which then ends it. Such an attempt makes no progress.
    chain = job(
        session, "learner", "steps", "3",
        minutes=1, grace_seconds=50, max_attempts_without_progress=20,
    )  # fmt: skip
    session.launch(chain)
    session.wait(
        lambda: session.ends("learner", "finished") == 1, what="the chain ends", timeout=900
    )
    started = [entry.attempt for entry in session.entries(ledger.Start)]
    assert started == list(range(1, len(started) + 1))
    assert len(started) >= 3
    again = [entry for entry in session.entries(ledger.Exit) if entry.next == "again"]
    assert len(again) == len(started) - 1
    assert {entry.asked for entry in again} == {"USR2"}
    assert {entry.code for entry in again} <= {75, 128 + signal.SIGUSR2}


def test_gpus_in_a_reservation(session: Session) -> None:
    place = Placement(partition="gpu", reservation="h100", gpu_type="h100")
    session.launch(job(session, "learner", "once", gpus=8), learner=place)
    session.wait(lambda: session.ends("learner", "finished") == 1, what="the job ends")
    written = session.written("learner-0.1.0")
    assert written["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert written["SLURMD_NODENAME"] == session.cluster.gpu_nodes[0]


def test_several_nodes_run_the_command_once_each(session: Session) -> None:
    session.launch(job(session, "learner", "once", nodes=2))
    session.wait(lambda: session.ends("learner", "finished") == 1, what="the job ends")
    assert session.written("learner-0.1.0")["SLURM_NODEID"] == "0"
    assert session.written("learner-0.1.1")["SLURM_NODEID"] == "1"


def test_scancel_of_one_task_is_final(session: Session) -> None:
    session.launch(job(session, "rollout", "wait", array_size=2))
    session.wait(lambda: session.starts("rollout") == 2, what="both tasks start")
    (submit,) = session.entries(ledger.Submit)
    assert session.cluster.run(["scancel", f"{submit.job_id}_1"]).returncode == 0
    session.wait(
        lambda: [state["phase"] for state in session.states()] == ["running", "cancelled"],
        what="one runs, one is cancelled",
    )
    session.finish()
    session.wait(lambda: session.ends("rollout", "finished") == 1, what="the other ends")
    assert session.starts("rollout") == 2


def test_cancel_then_resume(session: Session) -> None:
    buffer = job(session, "buffer", "wait")
    session.launch(buffer, job(session, "learner", "wait", after=("buffer",)))
    session.wait(lambda: session.starts("learner") == 1, what="the learner starts")
    session.drive("cancel")
    session.wait(
        lambda: {state["phase"] for state in session.states()} == {"cancelled"}, what="cancelled"
    )
    session.drive("resume")
    session.wait(lambda: session.starts("learner") == 2, what="the learner is back")
    session.finish()
    session.wait(
        lambda: {state["phase"] for state in session.states()} == {"finished"}, what="finished"
    )


def test_launching_twice_doubles_nothing(session: Session) -> None:
    jobs = (
        job(session, "buffer", "wait"),
        job(session, "rollout", "wait", array_size=2, after=("buffer",)),
    )
    session.launch(*jobs)
    session.launch(*jobs)
    assert len(session.entries(ledger.Submit)) == 2
    # a crash after sbatch and before the ledger's line: the submission is found, not doubled
    session.wait(lambda: session.starts("rollout") == 2, what="both tasks start")
    lines = session.run.ledger.read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"submit"' not in line and '"start"' not in line]
    session.run.ledger.write_text("".join(kept))
    session.launch(*jobs)
    assert len(session.entries(ledger.Submit)) == 2
    assert len(session.entries(ledger.Intent)) == 2
    queued = session.cluster.run(["squeue", "-h", "-r", "-t", "R", "-u", session.cluster.user.name])
    assert len(queued.stdout.splitlines()) == 3
    session.finish()


def test_scale_up_and_down(session: Session) -> None:
    session.launch(job(session, "rollout", "wait", array_size=1))
    session.wait(lambda: session.starts("rollout") == 1, what="the first task starts")
    session.drive("scale", "rollout", 3)
    session.wait(lambda: session.starts("rollout") == 3, what="two more start")
    session.drive("scale", "rollout", 2)
    session.wait(
        lambda: (
            [state["phase"] for state in session.states()] == ["running", "running", "cancelled"]
        ),
        what="the third task leaves",
    )
    session.finish()
    session.wait(lambda: session.ends("rollout", "finished") == 2, what="two tasks end")


def test_lost_node(session: Session) -> None:
    session.launch(job(session, "rollout", "wait", array_size=1))
    session.wait(lambda: session.starts("rollout") == 1, what="the task starts")
    node = session.written("rollout-0.1.0")["SLURMD_NODENAME"]
    session.cluster.crash(node)
    try:
        session.wait(lambda: session.starts("rollout") == 2, what="the task starts elsewhere")
        assert session.written("rollout-0.2.0")["SLURMD_NODENAME"] != node
    finally:
        session.cluster.start_slurmd(node)
    session.finish()
    session.wait(lambda: session.ends("rollout", "finished") == 1, what="the task ends")
    session.wait(lambda: session.cluster.node_state(node) == "idle", what="the node is back")


def test_node_that_was_cut_off_comes_back(session: Session) -> None:
    """Two copies of a task live at once; their attempts never share a number or a record."""
    session.launch(job(session, "rollout", "wait", array_size=1))
    session.wait(lambda: session.starts("rollout") == 1, what="the task starts")
    node = session.written("rollout-0.1.0")["SLURMD_NODENAME"]
    session.cluster.cut(node)
    try:
        session.wait(lambda: session.starts("rollout") == 2, what="the task starts elsewhere")
    finally:
        session.cluster.heal(node)
    session.wait(lambda: session.cluster.node_state(node) == "idle", what="the node is back")
    (state,) = session.states()
    assert (state["phase"], state["attempt"]) == ("running", 2)
    session.finish()
    session.wait(
        lambda: [state["phase"] for state in session.states()] == ["finished"], what="it finishes"
    )
    attempts = [entry.attempt for entry in session.entries(ledger.Start)]
    assert attempts == [1, 2]


def test_fan_out_over_an_array(session: Session) -> None:
    text = """
import json, math, sys
from pathlib import Path
import msgspec
from hpc.fanout import fan_out
from hpc.plan import Resources
from hpc.site import Site
site, directory = json.loads(sys.argv[1])
resources = Resources(nodes=1, cpus_per_node=1, memory_mib=200, gpus_per_node=0, walltime_minutes=5)
print(json.dumps([repr(result) for result in fan_out(
    math.sqrt, [4.0, -1.0, 9.0], site=msgspec.convert(site, Site), role="evaluation",
    resources=resources, directory=Path(directory), at_once=2, timeout_seconds=400,
)]))
"""
    site = Site(
        name="minicluster",
        backend=Backend.slurm,
        placements={"default": Placement(partition="cpu")},
    )
    given = json.dumps([msgspec.to_builtins(site), str(session.run.root.parent / "fan out")])
    done = session.cluster.run([session.python, "-c", text, given], timeout=600)
    assert done.returncode == 0, done.stderr
    first, second, third = json.loads(done.stdout)
    assert first == "Done(value=2.0)"
    assert "ValueError" in second
    assert third == "Done(value=3.0)"


def test_accounting_answers_are_understood(cluster_with_accounting: Any) -> None:
    from tests.cluster.conftest import poll

    cluster = cluster_with_accounting
    home = cluster.user.new_directory("accounting")
    array = cluster.sbatch("exit 3", "--array=0-1", "--mem=100", "--job-name=a|b", cwd=home)
    text = (
        "import sys; from hpc import slurm;"
        "print(sorted((r.job_id, r.name, r.state) for r in slurm.accounting([sys.argv[1]])))"
    )

    def answer() -> str:
        done = cluster.run([sys.executable, "-c", text, array])
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    poll(lambda: answer().count("FAILED") == 2, what="sacct knows both tasks")
    expected = [(f"{array}_{task}", "a|b", "FAILED") for task in (0, 1)]
    assert answer().strip() == str(expected)


def test_partition_that_does_not_exist(session: Session) -> None:
    with pytest.raises(AssertionError, match="partition 'nowhere' doesn't exist"):
        session.launch(job(session, "rollout", "once"), rollout=Placement(partition="nowhere"))
    assert not session.run.ledger.exists()
