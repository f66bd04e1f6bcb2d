"""`prorl-hpc watch`: what it prints, when it ends, how often it asks."""

import random
from dataclasses import replace

import pytest

from hpc.status import Phase, trouble
from prorl_hpc.cli.main import main
from prorl_hpc.cli.watch import Pace, is_over, summary
from prorl_hpc.observe.metrics import MetricsWriter
from prorl_hpc.recipe import load_recipe
from prorl_hpc.run import Run
from tests.prorl_hpc.cli.support import state


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


def test_a_busy_controller_is_asked_less_and_less_often_and_never_in_step() -> None:
    pace = Pace(seconds=60.0, rng=random.Random(3))
    assert pace.due(0.0)
    waits = []
    for answered in (True, False, False, False, False, True):
        pace.asked(0.0, answered=answered)
        waits.append(next(t for t in range(2000) if pace.due(float(t))))
    # each between 3/4 and 5/4 of 60, 120, 240, 480, 600 (the longest) and 60 again
    for wait, around in zip(waits, (60, 120, 240, 480, 600, 60), strict=True):
        assert 0.75 * around <= wait <= 1.25 * around + 1
    assert waits[0] != waits[-1]


def test_a_watch_tells_whether_slurm_could_be_asked() -> None:
    silent = replace(state("buffer", Phase.unknown), reason="squeue failed: timed out; no record")
    assert trouble([state("learner", Phase.running), silent]) == silent.reason
    assert trouble([state("learner", Phase.unknown)]) == ""
