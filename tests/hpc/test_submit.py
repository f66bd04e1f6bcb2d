"""Launch, cancel, resume and scale against recorded Slurm commands; states out of their answers."""

import os
from pathlib import Path

import pytest

from hpc import ledger, queueing, slurm, status, submit
from hpc.allocation import Allocation
from hpc.errors import PlanError, SiteError, SubmitError
from hpc.plan import Job
from hpc.prepare import prepare
from hpc.rundir import RunDirectory
from hpc.site import Placement, Site
from tests.hpc.fake_slurm import FakeSlurm, install
from tests.hpc.plans import HOSTILE, job, plan, resources, slurm_site
from tests.hpc.test_allocation import VARIABLES


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    made = install(tmp_path / "slurm")
    monkeypatch.setattr(queueing, "PAUSE_SECONDS", 0.0)
    monkeypatch.setenv("PATH", f"{tmp_path}/slurm/bin{os.pathsep}{os.environ['PATH']}")
    for name in ("SLURM_JOB_ID", "SBATCH_ACCOUNT", "PMI_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "leaks")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    return made


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / HOSTILE)


def launch(run: RunDirectory, *jobs: Job, site: Site | None = None) -> None:
    submit.launch(run.root, plan(*jobs, directory=run.root), site or slurm_site())


def three() -> tuple[Job, ...]:
    return (
        job("buffer"),
        job("rollout", array_size=3, array_limit=2, after=("buffer",)),
        job("learner", after=("buffer",)),
    )


def end(run: RunDirectory, name: str, index: int, *, following: str, job_id: str) -> None:
    start = ledger.Start(
        time=2e9, job=name, role=name, index=index, attempt=1, job_id=job_id, host="n1"
    )
    ended = ledger.Exit(
        time=2e9, job=name, index=index, attempt=1, code=0, next=following, reason="by test"
    )
    ledger.append(run.ledger, entry=start)
    ledger.append(run.ledger, entry=ended)


def phases(run: RunDirectory) -> dict[str, str]:
    return {f"{s.job}{s.index}": str(s.phase) for s in status.states(run)}


def test_jobs_are_queued_in_order_with_start_dependencies(
    fake: FakeSlurm, run: RunDirectory
) -> None:
    launch(run, *three())
    calls = fake.calls("sbatch")
    assert [Path(call[-1]).name for call in calls] == [
        "buffer.sbatch",
        "rollout.sbatch",
        "learner.sbatch",
    ]
    assert "--dependency=after:100" in calls[1]
    assert "--array=0-2%2" in calls[1]
    assert all((run.logs / role).is_dir() for role in ("buffer", "rollout", "learner"))
    assert set(phases(run).values()) == {"pending"}


def test_launching_twice_queues_once(fake: FakeSlurm, run: RunDirectory) -> None:
    launch(run, *three())
    launch(run, *three())
    assert len(fake.calls("sbatch")) == 3
    with pytest.raises(SubmitError, match="launched with another plan"):
        launch(run, job("buffer"))


@pytest.mark.parametrize("happened", [True, False])
def test_crash_between_sbatch_and_ledger(
    fake: FakeSlurm, run: RunDirectory, happened: bool
) -> None:
    launch(run, *three())
    lines = run.ledger.read_text().splitlines(keepends=True)
    run.ledger.write_text("".join(lines[:-1]))  # the learner's submit record is lost
    if not happened:
        fake.change(jobs=fake.jobs()[:-1])
    launch(run, *three())
    assert len(fake.calls("sbatch")) == (3 if happened else 4)
    assert sum(entry["script"].endswith("learner.sbatch") for entry in fake.jobs()) == 1
    assert phases(run)["learner0"] == "pending"


def test_a_job_that_ended_before_its_submission_was_recorded_is_not_doubled(
    fake: FakeSlurm, run: RunDirectory
) -> None:
    launch(run, *three())
    lines = run.ledger.read_text().splitlines(keepends=True)
    run.ledger.write_text("".join(lines[:-1]))  # the learner's submit record is lost
    end(run, "learner", 0, following="finished", job_id="102")
    fake.change(jobs=[job for job in fake.jobs() if job["id"] != "102"])  # and Slurm has forgotten
    launch(run, *three())
    assert len(fake.calls("sbatch")) == 3
    assert phases(run)["learner0"] == "finished"


@pytest.mark.parametrize("following", ["failed", "again"])
def test_a_resume_after_such_an_end_queues_it_once(
    fake: FakeSlurm, run: RunDirectory, following: str
) -> None:
    launch(run, job("images", array_size=2))
    lines = run.ledger.read_text().splitlines(keepends=True)
    run.ledger.write_text("".join(lines[:-1]))
    end(run, "images", 0, following="finished", job_id="100_0")
    end(run, "images", 1, following=following, job_id="100_1")
    fake.set_job("100_0", state="COMPLETED")
    fake.set_job("100_1", state="FAILED")
    submit.resume(run.root)  # the dead submission is found again, and stands for no living one
    assert len(fake.calls("sbatch")) == 2
    assert "--array=1" in fake.calls("sbatch")[1]


def test_a_submission_recorded_late_hides_no_successor(run: RunDirectory, fake: FakeSlurm) -> None:
    launch(run, job("images"))
    lines = run.ledger.read_text().splitlines(keepends=True)
    run.ledger.write_text("".join(lines[:-1]))
    end(run, "images", 0, following="again", job_id="100")
    again = ledger.Requeue(time=2e9, job="images", index=0, attempt=1, job_id="105", how="resubmit")
    ledger.append(run.ledger, entry=again)
    fake.set_job("100", state="FAILED")
    fake.change(jobs=[*fake.jobs(), {**fake.jobs()[0], "id": "105", "array": "105",
                                     "state": "RUNNING"}])  # fmt: skip
    submit.resume(run.root)
    assert len(fake.calls("sbatch")) == 1
    assert [(s.job_id, s.phase) for s in status.states(run)] == [("105", "running")]


def test_refused_job_is_told_in_slurms_words(fake: FakeSlurm, run: RunDirectory) -> None:
    fake.change(sbatch_error="Batch job submission failed: Invalid account")
    with pytest.raises(SubmitError, match=r"'buffer' wasn't queued: .*Invalid account"):
        launch(run, *three())
    fake.change(sbatch_error="")
    launch(run, *three())
    assert len(fake.jobs()) == 5


def test_a_submission_without_an_answer_is_found_or_told(
    fake: FakeSlurm, run: RunDirectory
) -> None:
    fake.change(unanswered=["queued", "lost"])
    with pytest.raises(SubmitError, match=r"whether job 'rollout' was queued can't be told .*out"):
        launch(run, *three())
    launch(run, *three())
    assert len(fake.jobs()) == 5
    assert set(phases(run).values()) == {"pending"}


@pytest.mark.parametrize(
    ("jobs", "site", "error", "message"),
    [
        ((job(),), {"placements": {"default": Placement(partition="x")}}, SiteError,
         "partition 'x' doesn't exist on this cluster; it has cpu, gpu"),
        ((job(),), {"placements": {"rollout": Placement(partition="x")}}, SiteError,
         "neither role 'learner' nor"),
        ((job(resources=resources(nodes=5)),), {}, SiteError, "nodes=5 .* exceeds 4"),
        ((job(resources=resources(walltime_minutes=1441)),), {}, SiteError, "1441 .* exceeds 1440"),
        ((job(resources=resources(nodes=4)),), {"max_node_hours": 1.0}, SiteError,
         "2.0 node-hours, above site.max_node_hours=1"),
        ((job(grace_seconds=1800),), {}, SiteError, "grace_seconds=1800"),
        ((job(resources=resources(cpus_per_node=65)),),
         {"placements": {"default": Placement(partition="cpu", cpus_per_node=64)}}, SiteError,
         "cpus_per_node=65 .* exceeds cpus_per_node=64"),
    ],
)  # fmt: skip
def test_nothing_is_queued_for_a_plan_that_can_not_run(
    fake: FakeSlurm,
    run: RunDirectory,
    jobs: tuple[Job, ...],
    site: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        launch(run, *jobs, site=slurm_site(**site))
    assert fake.calls("sbatch") == []


def test_relative_run_directory() -> None:
    with pytest.raises(PlanError, match="is relative"):
        submit.launch(Path("runs/x"), plan(job(), directory="runs/x"), slurm_site())


def test_states_from_the_queue(fake: FakeSlurm, run: RunDirectory) -> None:
    launch(run, *three())
    fake.set_job("100", state="RUNNING")
    fake.set_job("101_0", state="PENDING", reason="DependencyNeverSatisfied")
    fake.set_job("101_1", state="PREEMPTED")
    fake.set_job("101_2", state="SOMETHING_NEW")
    fake.set_job("102", state="NODE_FAIL")
    found = {f"{s.job}{s.index}": s for s in status.states(run)}
    assert {name: str(s.phase) for name, s in found.items()} == {
        "buffer0": "running",
        "rollout0": "pending",
        "rollout1": "preempted",
        "rollout2": "unknown",
        "learner0": "failed",
    }
    assert "never run" in found["rollout0"].reason
    assert "SOMETHING_NEW" in found["rollout2"].reason


def test_a_job_whose_script_never_began_is_told(fake: FakeSlurm, run: RunDirectory) -> None:
    launch(run, job())
    fake.set_job("100", state="RUNNING")
    (found,) = status.states(run)
    assert found.phase == "running"
    assert found.reason == "Slurm started it; its script hasn't said a word yet"
    start = ledger.Start(
        time=2e9, job="learner", role="learner", index=0, attempt=1, job_id="100", host="n1"
    )
    ledger.append(run.ledger, entry=start)
    (found,) = status.states(run)
    assert found.reason == ""


def test_a_job_that_was_preempted_for_good_is_resumed(fake: FakeSlurm, run: RunDirectory) -> None:
    launch(run, job(), site=slurm_site(accounting=True))
    fake.change(jobs=[], accounting={"100": "PREEMPTED"})
    (found,) = status.states(run)
    assert (found.phase, "not queued again" in found.reason) == ("failed", True)
    submit.resume(run.root)
    assert len(fake.calls("sbatch")) == 2


def test_completed_without_a_record_is_not_a_success(fake: FakeSlurm, run: RunDirectory) -> None:
    launch(run, job())
    fake.set_job("100", state="COMPLETED")
    assert phases(run) == {"learner0": "unknown"}
    end(run, "learner", 0, following="finished", job_id="100")
    assert phases(run) == {"learner0": "finished"}


def test_absent_job_is_unknown_unless_the_ledger_knows(fake: FakeSlurm, run: RunDirectory) -> None:
    launch(run, job(), job("buffer"))
    fake.change(jobs=[])
    assert phases(run) == {"learner0": "unknown", "buffer0": "unknown"}
    end(run, "learner", 0, following="failed", job_id="100")
    assert phases(run)["learner0"] == "failed"


def test_unreachable_controller(fake: FakeSlurm, run: RunDirectory) -> None:
    launch(run, *three())
    end(run, "learner", 0, following="finished", job_id="102")
    fake.change(down="Unable to contact slurm controller")
    found = {f"{s.job}{s.index}": s for s in status.states(run)}
    assert found["learner0"].phase == "finished"
    assert found["buffer0"].phase == "unknown"
    assert "Unable to contact" in found["buffer0"].reason
    with pytest.raises(SubmitError):
        submit.resume(run.root)


def test_reused_job_id_is_not_ours(fake: FakeSlurm, run: RunDirectory) -> None:
    launch(run, job())
    fake.set_job("100", comment="prorl-hpc run=other job=learner token=1", state="COMPLETED")
    assert phases(run) == {"learner0": "unknown"}
    fake.set_job("100", comment="", submitted="2026-01-01T00:00:00")
    assert phases(run) == {"learner0": "unknown"}


def test_accounting_where_the_queue_forgot(fake: FakeSlurm, run: RunDirectory) -> None:
    launch(run, job(), site=slurm_site(accounting=True))
    fake.change(jobs=[], accounting={"100": "CANCELLED by 1000"})
    assert phases(run) == {"learner0": "cancelled"}
    fake.change(accounting={})  # off: tolerated
    assert phases(run) == {"learner0": "unknown"}


def test_cancel_takes_waiting_jobs_off_and_asks_running_ones(
    fake: FakeSlurm, run: RunDirectory
) -> None:
    launch(run, *three())
    fake.set_job("100", state="RUNNING")
    submit.cancel(run.root)
    assert run.stop_request.exists()
    waiting, running = fake.calls("scancel")
    assert waiting[1:] == ["101_0", "101_1", "101_2", "102"]
    assert running[1:] == ["--signal=TERM", "--batch", "100"]
    with pytest.raises(SubmitError, match="was cancelled"):
        launch(run, *three())


def test_resume_starts_what_is_missing(fake: FakeSlurm, run: RunDirectory) -> None:
    launch(run, job("images", array_size=4))
    fake.set_job("100_0", state="RUNNING")
    fake.set_job("100_1", state="COMPLETED")
    end(run, "images", 1, following="finished", job_id="100_1")
    fake.set_job("100_2", state="FAILED")
    fake.set_job("100_3", state="CANCELLED")
    submit.resume(run.root)
    assert "--array=2-3" in fake.calls("sbatch")[-1]
    submit.resume(run.root)
    assert len(fake.calls("sbatch")) == 2
    assert phases(run)["images3"] == "pending"


@pytest.mark.parametrize("word", ["COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD"])
def test_what_is_between_two_states_is_not_started_again(
    fake: FakeSlurm, run: RunDirectory, word: str
) -> None:
    launch(run, job("images", array_size=2))
    for task in ("100_0", "100_1"):
        fake.set_job(task, state=word)
    end(run, "images", 1, following="again", job_id="100_1")
    submit.resume(run.root)
    assert len(fake.calls("sbatch")) == 1


def test_resume_brings_peers_back_together(fake: FakeSlurm, run: RunDirectory) -> None:
    launch(run, job("buffer"), job("learner", after=("buffer",)))
    fake.set_job("100", state="COMPLETED")
    end(run, "buffer", 0, following="finished", job_id="100")
    fake.set_job("101", state="FAILED")
    end(run, "learner", 0, following="failed", job_id="101")
    submit.resume(run.root)
    assert len(fake.calls("sbatch")) == 4
    assert "--dependency=after:102" in fake.calls("sbatch")[-1]


def test_scale(fake: FakeSlurm, run: RunDirectory) -> None:
    site = slurm_site(max_array_size=4)
    launch(run, job("rollout", array_size=3), site=site)
    submit.scale(run.root, "rollout", 6)
    second, third = fake.calls("sbatch")[1:]
    assert "--array=3" in second
    assert second[-1].endswith("/rollout.sbatch")
    assert "--array=0-1" in third
    assert third[-1].endswith("/rollout.chunk-1.sbatch")
    assert len(phases(run)) == 6
    for name in ("100_0", "100_1", "100_2"):
        fake.set_job(name, state="RUNNING")
    submit.scale(run.root, "rollout", 2)
    waiting, running = fake.calls("scancel")
    assert waiting[1:] == ["101_3", "102_0", "102_1"]
    assert running[1:] == ["--signal=TERM", "--batch", "100_2"]
    submit.scale(run.root, "rollout", 4)
    assert "--array=3" in fake.calls("sbatch")[-1]  # index 2 still runs


def test_a_run_that_is_not_going_on_is_not_scaled(fake: FakeSlurm, run: RunDirectory) -> None:
    """Nothing would ever be there for the new tasks to work with."""
    prepare(run, plan=plan(*three(), directory=run.root), site=slurm_site())
    with pytest.raises(SubmitError, match="was never started"):
        submit.scale(run.root, "rollout", 5)
    launch(run, *three())
    for one in fake.jobs():
        fake.set_job(one["id"], state="CANCELLED")
    with pytest.raises(SubmitError, match=r"isn't running; .*resume"):
        submit.scale(run.root, "rollout", 5)
    assert len(fake.calls("sbatch")) == 3
    assert status.indexes_of(run, three()[1]) == (0, 1, 2)
    fake.set_job("100", state="RUNNING")
    submit.scale(run.root, "rollout", 5)
    assert "--array=0-4%2" in fake.calls("sbatch")[-1]


def test_slurm_off_this_machine(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmitError, match="take site=local"):
        launch(run, job())


def test_host_names(fake: FakeSlurm) -> None:
    found = Allocation.from_environment({**VARIABLES, "SLURM_JOB_NODELIST": "gpu[1-2]"})
    assert found.hosts == ("gpu1", "gpu2")
    assert slurm.hostnames("") == ()


def test_times_by_hand() -> None:
    assert slurm.minutes("1-02:03:04") == 1563  # 1440 + 120 + 3
    assert slurm.minutes("30:00") == 30
    assert slurm.minutes("UNLIMITED") is None
    assert slurm.timestamp("N/A") is None
    with pytest.raises(SubmitError, match="not a job id"):
        slurm.parsable_id("Submitted batch job 7")


def test_arrays_are_held_against_the_nodes_of_their_partition_also_when_scaled(
    fake: FakeSlurm, run: RunDirectory
) -> None:
    places = {
        "default": Placement(partition="cpu"),
        "rollout": Placement(partition="cpu", max_nodes=4),
    }
    site = slurm_site(placements=places, max_node_hours=4.0)
    jobs = (job("buffer"), job("rollout", array_size=3, after=("buffer",)))
    with pytest.raises(SiteError, match="5 tasks of job 'rollout' exceed max_nodes=4"):
        too_many = job("rollout", array_size=5, after=("buffer",))
        launch(run, jobs[0], too_many, site=site)
    launch(run, *jobs, site=site)
    queued = len(fake.calls("sbatch"))
    with pytest.raises(SiteError, match=r"exceed max_nodes=4 .*site\.placements\.rollout"):
        submit.scale(run.root, "rollout", 5)
    submit.scale(run.root, "rollout", 4)
    assert len(fake.calls("sbatch")) == queued + 1


def test_scaling_above_the_node_hours_of_the_site_is_refused(
    fake: FakeSlurm, run: RunDirectory
) -> None:
    # Half an hour each: 4 tasks take 2 node-hours, 5 take 2.5.
    site = slurm_site(max_node_hours=2.2)
    launch(run, job("rollout", array_size=2), site=site)
    submit.scale(run.root, "rollout", 4)
    with pytest.raises(SiteError, match=r"2\.5 node-hours, above site\.max_node_hours=2\.2"):
        submit.scale(run.root, "rollout", 5)
    assert status.indexes_of(run, job("rollout", array_size=2)) == (0, 1, 2, 3)
