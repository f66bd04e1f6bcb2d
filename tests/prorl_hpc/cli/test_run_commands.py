"""Commands on a run that exists: written by a dry run, with attempts and metrics put in by hand."""

import json
import shutil
from dataclasses import replace

import pytest

from hpc import ledger
from hpc.errors import UserError
from hpc.status import Phase
from prorl_hpc.cli.logs import attempt_directory
from prorl_hpc.cli.main import main
from prorl_hpc.cli.status import duration, jobs_table
from prorl_hpc.cli.table import table
from prorl_hpc.observe.metrics import MetricsWriter
from prorl_hpc.run import Run
from tests.prorl_hpc.cli.support import state


def test_status_of_a_run_that_was_never_started(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "quickstart"]) == 0
    out = capsys.readouterr().out
    assert "learner: no step yet" in out
    assert "not submitted" in out
    assert main(["status", str(run.root), "--json"]) == 0
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert [job["job"] for job in jobs] == ["buffer", "rollout", "rollout", "learner"]


def test_tasks_of_which_the_same_is_to_be_said_share_a_row() -> None:
    waiting = [replace(state("rollout", Phase.pending, index=i), reason="Priority") for i in (0, 1)]
    odd = replace(state("rollout", Phase.running, index=2), reason="its script hasn't said a word")
    running = [state("rollout", Phase.running, index=i) for i in (3, 4, 5)]
    failed = [state("rollout", Phase.failed, index=i) for i in (6, 7)]
    found = [*waiting, odd, *running, *failed]
    lines = [line.split() for line in jobs_table(found, now=9.0, every=False).splitlines()[2:]]
    shown = sorted(" ".join(line) for line in lines)
    assert shown == [
        "rollout 2 running 1 9 s h its script hasn't said a word",
        "rollout 2 tasks pending 1 Priority",
        "rollout 3 tasks running 1",
        "rollout 6 failed 1 9 s h",
        "rollout 7 failed 1 9 s h",
    ]
    assert len(jobs_table(found, now=9.0, every=True).splitlines()) == 2 + len(found)


def test_status_shows_progress_and_dead_jobs(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    start = ledger.Start(
        time=1.0, job="learner", role="learner", index=0, attempt=1, job_id="local-1", host="n1"
    )
    ledger.append(run.ledger, entry=start)
    with MetricsWriter(run.metrics("learner")) as writer:
        writer.write(event="step", step=4, reward=0.5, kl=0.01)
    assert main(["status", "quickstart", "--all"]) == 0
    out = capsys.readouterr().out
    assert "step 4/" in out
    assert "reward 0.5" in out
    assert "supervisor is gone" in out


def test_status_names_the_culprit_of_a_failed_run(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for job, when, reason in (("learner", 5.0, "exit code 1"), ("buffer", 9.0, "lost its peer")):
        for entry in (
            ledger.Submit(time=0.5, token="t", job=job, job_id="local-1"),
            ledger.Start(
                time=1.0, job=job, role=job, index=0, attempt=1, job_id="local-1", host="n1"
            ),
            ledger.Exit(
                time=when, job=job, index=0, attempt=1, code=1, next="failed", reason=reason
            ),
        ):
            ledger.append(run.ledger, entry=entry)
    run.metrics("buffer").parent.mkdir(exist_ok=True)
    run.metrics("buffer").write_text('{"time": 1.0, "status": {"groups_dropped": 7}}\n')
    assert main(["status", "quickstart"]) == 1
    out = capsys.readouterr().out
    assert "end: learner attempt 1 failed on n1: exit code 1; next: prorl-hpc logs" in out
    assert "7 dropped" in out
    assert main(["status", "quickstart", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["ending"]["job"] == "learner"
    assert data["buffer"]["groups_dropped"] == 7
    assert main(["watch", "quickstart"]) == 1
    assert "learner attempt 1 failed on n1" in capsys.readouterr().out


def test_unknown_run_names_those_there_are(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "watch", "logs", "cancel", "resume", "report"):
        assert main([command, "nope"]) == 2
        assert "runs there: quickstart" in capsys.readouterr().err


def test_logs_of_the_newest_attempt(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "quickstart", "learner"]) == 2
    assert "has no attempt yet" in capsys.readouterr().err
    for attempt in (1, 2, 10):
        directory = run.attempt_logs("learner", index=0, attempt=attempt)
        directory.mkdir(parents=True)
        (directory / "out.log").write_text(f"one\ntwo\nattempt {attempt}\n")
    assert main(["logs", "quickstart", "learner", "--lines", "1"]) == 0
    assert capsys.readouterr().out == "attempt 10\n"
    assert main(["logs", "quickstart", "--attempt", "2", "--lines", "0"]) == 0
    assert capsys.readouterr().out == "one\ntwo\nattempt 2\n"
    with pytest.raises(UserError, match=r"choose of \[1, 2, 10\]"):
        attempt_directory(run, "learner", index=0, attempt=3)


def test_logs_that_are_empty_say_so(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run.attempt_logs("rollout", index=1, attempt=1)
    directory.mkdir(parents=True)
    (directory / "out.log").touch()
    assert main(["logs", "quickstart", "rollout", "1"]) == 0
    assert f"nothing is in {directory} yet\n" in capsys.readouterr().err
    (run.logs / "rollout" / "local-1.out").write_text("bash: module: command not found\n")
    assert main(["logs", "quickstart", "rollout", "1"]) == 0
    assert "its script's own words are in" in capsys.readouterr().err


def test_logs_of_a_role_that_there_is_not(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (run.logs / "supervisor.log").touch()
    assert main(["logs", "quickstart", "rolout"]) == 2
    err = capsys.readouterr().err
    assert "has no role 'rolout'; it has buffer, learner, rollout\n" in err
    run.attempt_logs("rollout", index=1, attempt=1).mkdir(parents=True)
    assert main(["logs", "quickstart", "rollout", "7"]) == 2
    assert "rollout 7 of run 'quickstart' has no attempt yet; begun have 1;" in (
        capsys.readouterr().err
    )


def test_first_letters_of_a_name_will_do_where_nothing_changes(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "quick"]) == 0
    assert "run quickstart" in capsys.readouterr().out
    for argv in (["cancel", "quick"], ["resume", "quick"], ["scale", "quick", "--rollout", "1"]):
        assert main(argv) == 2
        assert "run 'quick' isn't in runs (runs there: quickstart)" in capsys.readouterr().err
    shutil.copytree(run.root, run.root.with_name("quicksand"))
    assert main(["status", "quick"]) == 2
    assert "2 begin so (" in capsys.readouterr().err
    assert main(["status", "quicks"]) == 2
    assert main(["status", "quicksa"]) == 0


def test_cancel_ends_what_may_have_been_queued(run: Run) -> None:
    # the submit was killed before it could record sbatch's answer
    intent = ledger.Intent(time=1.0, job="buffer", token="t", script="buffer.sbatch", indexes=None)
    ledger.append(run.ledger, entry=intent)
    assert main(["cancel", "quickstart"]) == 0
    assert run.stop_request.exists()


def test_cancel_of_a_run_that_has_ended_changes_nothing(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cancel", "quickstart"]) == 0
    assert "isn't running, there is nothing to cancel: never started" in capsys.readouterr().out
    for job, index in (("buffer", 0), ("learner", 0), ("rollout", 0), ("rollout", 1)):
        for entry in (
            ledger.Start(
                time=1.0, job=job, role=job, index=index, attempt=1, job_id="local-1", host="n1"
            ),
            ledger.Exit(
                time=2.0, job=job, index=index, attempt=1, code=0, next="finished", reason="done"
            ),
        ):
            ledger.append(run.ledger, entry=entry)
    assert main(["cancel", "quickstart"]) == 0
    assert "nothing to cancel: done; next: prorl-hpc report" in capsys.readouterr().out
    assert not run.stop_request.exists()
    for argv, what in (
        (["scale", "quickstart", "--rollout", "3"], "be scaled"),
        (["reset-reference", "quickstart"], "reset its reference"),
    ):
        assert main(argv) == 2
        assert f"run 'quickstart' can't {what}: it is done; next: " in capsys.readouterr().err
    assert not run.requests.exists()


def test_report_and_list(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "quickstart"]) == 0
    assert run.report.read_text().startswith("<!doctype html>")
    capsys.readouterr()
    assert main(["list"]) == 0
    assert "quickstart" in capsys.readouterr().out
    assert main(["list", "algorithms"]) == 0
    assert "prorl_v2" in capsys.readouterr().out
    assert main(["list", "keys"]) == 0
    assert "algorithm.reset.every_steps" in capsys.readouterr().out


def test_manual_reset_leaves_a_new_request_each_time(run: Run) -> None:
    assert main(["reset-reference", "quickstart"]) == 0
    first = (run.requests / "reset-reference").read_text()
    assert main(["reset-reference", "quickstart"]) == 0
    assert (run.requests / "reset-reference").read_text() != first


def test_tables_and_durations() -> None:
    assert table(("a", "n"), [("x", 1), ("yy", None)]) == "a   n\n--  -\nx   1\nyy  -"
    assert [duration(s) for s in (3, 150, 8000)] == ["3 s", "2 min", "2.2 h"]
