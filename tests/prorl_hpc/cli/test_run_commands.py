"""Commands on a run that exists: written by a dry run, with attempts and metrics put in by hand."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from hpc import ledger
from hpc.errors import UserError
from hpc.status import JobState, Phase
from prorl_hpc.buffer.image import shard_image, write_shard
from prorl_hpc.buffer.manifest import Closed, Line, ManifestWriter, Owner, Shard
from prorl_hpc.buffer.validation import first_group
from prorl_hpc.cli.evaluate import parse_ks
from prorl_hpc.cli.logs import attempt_directory
from prorl_hpc.cli.main import main
from prorl_hpc.cli.status import duration
from prorl_hpc.cli.table import table
from prorl_hpc.cli.watch import is_over, summary
from prorl_hpc.evaluation.estimators import EvaluationError
from prorl_hpc.evaluation.evaluate import plan_leases, score_tasks
from prorl_hpc.observe.metrics import MetricsWriter
from prorl_hpc.observe.trajectories import describe_trajectory, segments
from prorl_hpc.policy import publish_directory, publish_policy
from prorl_hpc.recipe import Recipe, TaskConfig, load_recipe
from prorl_hpc.records import Kind, Outcome, Trajectory
from prorl_hpc.run import Run
from tests.prorl_hpc.cli.support import recipe_directory


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    groups = recipe_directory(tmp_path / "groups")
    argv = ["submit", "recipe=quickstart", "site=desk", "--recipe-dir", str(groups), "--dry-run"]
    assert main(argv) == 0
    return Run(tmp_path / "runs" / "quickstart")


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


def store_groups(run: Run, made: list[Trajectory]) -> None:
    """What a buffer leaves: one shard, and its groups closed."""
    run.shards.mkdir(parents=True)
    image = shard_image(made)
    digest = write_shard(run.shard(7), image=image)
    rows = tuple((t.group_id, t.rollout_index, True) for t in made)
    lines: list[Line] = [
        Owner(format=1, attempt=1, host="n1"),
        Shard(number=7, digest=digest, num_bytes=image.num_bytes, rows=rows),
    ]
    for group in sorted({t.group_id for t in made}):
        rollouts = tuple((t.rollout_index, 7, row, True) for row, t in enumerate(made)
                         if t.group_id == group)  # fmt: skip
        lines.append(
            Closed(
                group=group,
                kind=Kind.validation,
                task="a",
                instance_id=f"a-{group}",
                num_rollouts=2,
                rollouts=rollouts,
                reason="complete",
            )
        )
    writer = ManifestWriter(run.manifest, owner=1)
    writer.append(lines)
    writer.close()


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


def test_watch_and_status_show_the_warm_up(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsWriter(run.metrics("learner")) as writer:
        writer.write(event="warmup", step=21, loss=1.25)
        writer.write(event="warmup", step="x", loss=None)
    steps = load_recipe(run.recipe).warmup.steps
    assert main(["watch", "quickstart"]) == 1
    told = f"warmup  step 21/{steps}: loss 1.250 nats per token"
    assert told in capsys.readouterr().out
    with MetricsWriter(run.metrics("learner")) as writer:
        writer.write(event="warmup", step=41, loss=None)
    assert main(["status", "quickstart"]) == 0
    assert f"no step yet, warmup step 41/{steps}\n" in capsys.readouterr().out


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


def test_export_checks_hashes(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "quickstart", "out"]) == 2
    assert "there: none yet" in capsys.readouterr().err
    publish_policy(
        run,
        version=3,
        step=3,
        write=lambda path: (path / "w.safetensors").write_bytes(b"w") and None,
    )
    assert main(["export", "quickstart", "out"]) == 0
    assert Path("out/w.safetensors").read_bytes() == b"w"
    assert main(["export", "quickstart", "out"]) == 2
    (run.policy(3) / "w.safetensors").write_bytes(b"x")
    assert main(["export", "quickstart", "out2"]) == 2
    assert "damaged" in capsys.readouterr().err
    assert not Path("out2").exists()


def test_export_of_a_step_takes_whatever_holds_it(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(path: Path) -> None:
        (path / "w.safetensors").write_bytes(b"w")

    assert main(["export", "quickstart", "out", "--step", "4"]) == 2
    assert (
        "step 4 of run 'quickstart' has no checkpoint; there: none yet" in capsys.readouterr().err
    )
    publish_policy(run, version=5, step=4, write=write)  # after a roll-back
    assert main(["export", "quickstart", "out", "--step", "4"]) == 0
    assert "version 5, step 4" in capsys.readouterr().out
    publish_directory(run.export(2), version=2, step=2, write=write)
    assert main(["export", "quickstart", "two", "--step", "2"]) == 0
    assert Path("two/w.safetensors").exists()
    assert main(["export", "quickstart", "two", "--step", "4"]) == 2
    assert "two exists" in capsys.readouterr().err


def test_show_without_groups(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "quickstart", "--group", "7"]) == 2
    assert "none is closed yet" in capsys.readouterr().err


def test_show_speaks_of_groups_as_the_user_counts_them(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    first = first_group(6)
    made = [trajectory(1.0, group=group, index=i) for group in (0, 5, first, first + 1)
            for i in (0, 1)]  # fmt: skip
    store_groups(run, made)
    assert main(["show", "quickstart", "--group", "99999"]) == 2
    err = capsys.readouterr().err
    assert "group 99999 of run 'quickstart' isn't in its buffer (closed: 0 to 5; " in err
    assert "--validation of version 6 (2 groups))\n" in err
    for wrong in (["--group", str(first)], ["--group", "2", "--validation", "6"],
                  ["--group", "0", "--validation", "7"], ["--group", "-1", "--validation", "7"],
                  ["--group", "0", "--rollout", "9"]):  # fmt: skip
        assert main(["show", "quickstart", "--ids", *wrong]) == 2
    assert "rollout 9 of group 0 isn't usable; usable are [0, 1]" in capsys.readouterr().err
    assert main(["show", "quickstart", "--ids", "--group", "1", "--validation", "6"]) == 0
    out = capsys.readouterr().out
    assert "group 1: validation of version 6, task a, " in out
    assert str(first) not in out


def test_export_of_an_empty_buffer(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buffer", "export", "quickstart", "all.jsonl"]) == 0
    assert "0 trajectories" in capsys.readouterr().out
    assert main(["buffer", "export", "quickstart", "all.txt"]) == 2
    assert main(["buffer", "export", "quickstart", "none/all.jsonl"]) == 2
    assert "can't be written" in capsys.readouterr().err


def test_segments_part_what_was_given_from_what_was_sampled() -> None:
    one = trajectory(0.5)
    assert segments(one) == [(False, [5, 6]), (True, [7, 8])]
    text = describe_trajectory(one, decode=lambda ids: "-".join(map(str, ids)))
    assert "reward 0.5, scored" in text
    assert "--- policy ---\n7-8" in text


def test_when_a_watch_ends() -> None:
    done = [state("learner", Phase.finished), state("buffer", Phase.failed)]
    assert is_over(done, local=False)
    assert not is_over([*done, state("rollout", Phase.preempted)], local=True)
    lost = [*done, state("rollout", Phase.unknown)]
    assert is_over(lost, local=True)
    assert not is_over(lost, local=False)
    assert not is_over(done, local=True, supervised=True)


def test_watch_of_a_run_that_was_never_started(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", "quickstart"]) == 1
    assert "never started; next: the same prorl-hpc submit" in capsys.readouterr().out


def test_summary_counts_array_tasks() -> None:
    found = [state("buffer", Phase.running)]
    found += [state("rollout", Phase.running, index=i) for i in range(3)]
    found.append(state("rollout", Phase.pending, index=3))
    assert summary(found) == "buffer running, rollout 1 pending 3 running"


def test_tables_and_durations() -> None:
    assert table(("a", "n"), [("x", 1), ("yy", None)]) == "a   n\n--  -\nx   1\nyy  -"
    assert [duration(s) for s in (3, 150, 8000)] == ["3 s", "2 min", "2.2 h"]


def test_evaluation_scores_by_hand() -> None:
    rewards = {0: [1.0, 0.0], 1: [0.0, 0.0], 2: [1.0, None]}
    every = [
        trajectory(reward, group=group, index=i)
        for group, values in rewards.items()
        for i, reward in enumerate(values)
    ]
    score = score_tasks(every, ks=[1], seed=0)["a"]
    assert (score.instances, score.samples, score.failures) == (3, 1, 1)
    # pass@1: 1/2, 0 and 1 (one usable rollout); their mean is 1/2
    assert score.pass_at[1].mean == pytest.approx(0.5)
    assert score.response_tokens == 2.0
    # one of two instances was ever solved; the third has too few rollouts to say
    two = score_tasks(every, ks=[2], seed=0)["a"]
    assert two.pass_at[2].mean == pytest.approx(0.5)
    with pytest.raises(EvaluationError, match="pass@3 needs at least 3 samples"):
        score_tasks(every, ks=[3], seed=0)
    with pytest.raises(EvaluationError, match="task a: all rollouts were lost"):
        score_tasks(every[-1:], ks=[1], seed=0)


def test_leases_of_an_evaluation() -> None:
    tasks = {"a": TaskConfig(kind="logic", validation_size=64)}
    recipe = Recipe(name="r", steps=1, tasks=tasks)
    leases = plan_leases(recipe, sizes={"a": 3}, num_samples=4)
    assert [lease.instance_index for lease in leases] == [0, 1, 2]
    assert leases[0].rollouts == (0, 1, 2, 3)
    assert len({lease.seed for lease in leases}) == 3


@pytest.mark.parametrize("text", ["0", "5", "x", ""])
def test_ks_that_cannot_be_estimated(text: str) -> None:
    with pytest.raises(UserError, match="--k"):
        parse_ks(text, samples=4)
    assert parse_ks("4,1", samples=4) == [1, 4]
