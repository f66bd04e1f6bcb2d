"""Attempts away from nodes that did a job no good, against recorded Slurm commands."""

import os
from pathlib import Path

import pytest

from hpc import again, ledger, queueing, start, status
from hpc.attempts import Attempt, bad_hosts
from hpc.context import Context
from hpc.errors import NoAnswer
from hpc.prepare import prepare
from hpc.rundir import RunDirectory
from tests.hpc.fake_slurm import FakeSlurm, install
from tests.hpc.plans import job, plan, slurm_site
from tests.hpc.test_start import variables

SCRIPT = Path("scripts/learner.sbatch")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    made = install(tmp_path / "slurm")
    monkeypatch.setattr(queueing, "PAUSE_SECONDS", 0.0)
    monkeypatch.setenv("PATH", f"{tmp_path}/slurm/bin{os.pathsep}{os.environ['PATH']}")
    return made


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    prepare(made, plan=plan(job(), directory=made.root), site=slurm_site())
    return made


def given(run: RunDirectory, *, job: int, host: str, **changes: str) -> dict[str, str]:
    names = {"SLURM_JOB_ID": str(job), "SLURMD_NODENAME": host, "SLURM_JOB_END_TIME": "5000",
             "PRORL_ATTEMPTS_WITHOUT_PROGRESS": "5"}  # fmt: skip
    return variables(run, **{**names, **changes})


def refuse(run: RunDirectory, environment: dict[str, str]) -> None:
    context = Context.from_environment(environment)
    start.refuse(context, line="module load x", script=SCRIPT, environment=environment, now=1.0)


def attempt(run: RunDirectory, environment: dict[str, str], *, code: int, asked: str = "") -> str:
    context = Context.from_environment(environment)
    text = start.begin(context, script=SCRIPT, environment=environment, now=1.0)
    lines = (line.removeprefix("export ") for line in text.splitlines())
    inside = {**environment, **dict(line.split("=", 1) for line in lines)}
    return start.end(context, code=code, asked=asked, environment=inside)


def ends(run: RunDirectory) -> list[ledger.Exit]:
    return [e for e in ledger.read(run.ledger).entries if isinstance(e, ledger.Exit)]


def test_bad_hosts_by_hand() -> None:
    def one(host: str, *, progress: float = 1.0, asked: str = "", refused: bool = False) -> Attempt:
        return Attempt(progress_at_start=progress, asked=asked, host=host, refused=refused)

    assert bad_hosts([one("a"), one("b")], progress=1.0) == ()
    assert bad_hosts([one("a"), one("b"), one("a")], progress=1.0) == ("a",)
    assert bad_hosts([one("a"), one("b", refused=True)], progress=1.0) == ("b",)
    # the walltime, preemption and what came before the last progress are no node's fault
    assert bad_hosts([one("a", asked="TERM"), one("a", asked="USR2"), one("a")], progress=1.0) == ()
    assert bad_hosts([one("a", progress=0.0), one("a")], progress=1.0) == ()


def test_a_node_without_what_the_site_needs_is_left_once(
    fake: FakeSlurm, run: RunDirectory
) -> None:
    refuse(run, given(run, job=7, host="n1"))
    (call,) = fake.calls("sbatch")
    token = call[1].removeprefix("--comment=prorl-hpc run=r1 job=learner token=")
    assert call[2:] == ["--exclude=n1", str(SCRIPT)]
    (requeue,) = (e for e in ledger.read(run.ledger).entries if isinstance(e, ledger.Requeue))
    assert (requeue.job_id, requeue.how, requeue.token) == ("100", "resubmit", token)
    refuse(run, given(run, job=100, host="n2"))  # then it isn't the node
    assert len(fake.calls("sbatch")) == 1
    assert [(end.next, end.reason) for end in ends(run)] == [
        ("again", "site.setup failed on n1: module load x"),
        ("failed", "site.setup failed on n2: module load x"),
    ]


@pytest.mark.parametrize(
    "changes", [{"SLURM_JOB_RESERVATION": "r"}, {"PRORL_ATTEMPTS_WITHOUT_PROGRESS": "0"}]
)
def test_where_there_is_no_other_node_it_fails(
    fake: FakeSlurm, run: RunDirectory, changes: dict[str, str]
) -> None:
    refuse(run, given(run, job=7, host="n1", **changes))
    assert fake.calls("sbatch") == []
    assert [end.next for end in ends(run)] == ["failed"]


def test_a_refusal_that_can_not_be_submitted_again_is_final(
    fake: FakeSlurm, run: RunDirectory
) -> None:
    fake.change(sbatch_error="invalid account")
    refuse(run, given(run, job=7, host="n1"))
    assert [end.next for end in ends(run)] == ["again", "failed"]
    assert ends(run)[-1].reason.endswith("invalid account")


def test_two_failures_on_a_node_are_held_against_it(fake: FakeSlurm, run: RunDirectory) -> None:
    first = given(run, job=7, host="n1", SLURM_ARRAY_JOB_ID="6", SLURM_ARRAY_TASK_ID="4")
    assert attempt(run, first, code=137) == "requeue"
    assert attempt(run, first, code=137) == "resubmit"
    context = Context.from_environment(first)
    again.resubmit(context, script=SCRIPT, attempt=2, environment=first)
    assert fake.calls("sbatch")[0][2:] == ["--array=4", "--exclude=n1", str(SCRIPT)]
    fake.change(no_other_node="Requested node configuration is not available")
    again.resubmit(context, script=SCRIPT, attempt=2, environment=first)
    assert fake.calls("sbatch")[-1][2:] == ["--array=4", str(SCRIPT)]
    # several nodes: nobody can tell which of them it was
    several = given(run, job=9, host="n1", SLURM_JOB_NUM_NODES="2")
    assert attempt(run, several, code=137) == "requeue"


def ended(run: RunDirectory) -> tuple[Context, dict[str, str]]:
    """A job of a partition that cancels what it preempts, about to submit itself again."""
    before = given(run, job=7, host="n1", PRORL_ON_PREEMPT="cancel")
    assert attempt(run, before, code=75, asked="TERM") == "resubmit"
    return Context.from_environment(before), before


@pytest.mark.parametrize(
    ("unanswered", "silent", "submissions"),
    [
        (["queued"], 0, 1),
        (["queued"], 2, 1),  # squeue gives no answer either, at first
        (["lost"], 0, 2),
        (["lost", "queued"], 1, 2),
    ],
)
def test_a_submission_without_an_answer_is_looked_for_before_it_is_made_again(
    fake: FakeSlurm, run: RunDirectory, unanswered: list[str], silent: int, submissions: int
) -> None:
    context, before = ended(run)
    fake.change(unanswered=unanswered, squeue_silent=silent)
    new_id = again.resubmit(context, script=SCRIPT, attempt=1, environment=before)
    assert [one["id"] for one in fake.jobs()] == [new_id]
    calls = fake.calls("sbatch")
    assert len(calls) == submissions
    assert len({call[1] for call in calls}) == 1  # the same token
    assert queueing.half_made(run) == []
    assert [(s.job_id, s.phase) for s in status.states(run)] == [(new_id, "pending")]


def test_a_submission_of_which_nobody_can_tell_is_left_to_a_resume(
    fake: FakeSlurm, run: RunDirectory
) -> None:
    context, before = ended(run)
    fake.change(unanswered=["queued"], squeue_silent=queueing.LOOKS)
    with pytest.raises(NoAnswer):
        again.resubmit(context, script=SCRIPT, attempt=1, environment=before)
    assert len(fake.calls("sbatch")) == 1
    queueing.adopt(run)  # as a resume, or any other command that changes the run
    assert queueing.half_made(run) == []
    assert [(s.job_id, s.phase) for s in status.states(run)] == [("100", "pending")]


def test_a_node_is_left_once_where_the_controller_is_busy(
    fake: FakeSlurm, run: RunDirectory
) -> None:
    """No answer isn't the refusal of a submission without that node."""
    fake.change(unanswered=["queued"], squeue_silent=queueing.LOOKS)
    refuse(run, given(run, job=7, host="n1"))
    assert len(fake.calls("sbatch")) == 1
    assert [end.next for end in ends(run)] == ["again"]


def test_a_job_that_slurm_refuses_to_take_again_has_failed(
    fake: FakeSlurm, run: RunDirectory
) -> None:
    context, before = ended(run)
    fake.change(sbatch_error="invalid account")
    again.follow_up(context, script=SCRIPT, attempt=1, environment=before)
    assert [end.next for end in ends(run)] == ["again", "failed"]
    assert "not submitted again: sbatch failed: sbatch: error: invalid" in ends(run)[-1].reason
