"""When the learner of a run has ended for good."""

import pytest

from hpc import ledger
from prorl_hpc.over import LOOK_SECONDS, LearnerWatch, learner_end
from prorl_hpc.run import Run


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    run.root.mkdir()
    return run


def start(attempt: int) -> ledger.Start:
    return ledger.Start(
        time=0.0, job="learner", role="learner", index=0, attempt=attempt, job_id="1", host="h"
    )


def end(attempt: int, follows: str) -> ledger.Exit:
    return ledger.Exit(
        time=0.0, job="learner", index=0, attempt=attempt, code=0, next=follows, reason="why"
    )


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], ""),
        ([start(1)], ""),
        ([start(1), end(1, "again")], ""),
        ([start(1), end(1, "finished")], "the run is finished"),
        ([start(1), end(1, "failed")], "the learner ended for good: why"),
        ([start(1), end(1, "exhausted")], "the learner ended for good: why"),
        ([start(1), end(1, "cancelled"), ledger.Resume(time=0.0, job="learner")], ""),
        ([start(1), end(1, "cancelled"), ledger.Resume(time=0.0, job="rollout")],
         "the learner ended for good: why"),
        ([start(1), end(1, "failed"), start(2)], ""),
    ],
)  # fmt: skip
def test_the_learner_is_over_unless_it_was_resumed_since(
    run: Run, entries: list[ledger.Entry], expected: str
) -> None:
    for entry in entries:
        ledger.append(run.ledger, entry=entry)
    found = learner_end(run)
    assert (found.reason if found else "") == expected
    assert bool(found and found.finished) == (expected == "the run is finished")


def test_a_watch_sees_an_end_and_its_taking_back(run: Run) -> None:
    now = [0.0]
    watch = LearnerWatch(run, clock=lambda: now[0])
    assert watch() is None  # no ledger yet
    for entry in (start(1), end(1, "finished")):
        ledger.append(run.ledger, entry=entry)
    assert watch() is None  # looked just now
    now[0] += LOOK_SECONDS
    found = watch()
    assert found is not None
    assert found.finished
    ledger.append(run.ledger, entry=ledger.Resume(time=0.0, job="learner"))
    now[0] += LOOK_SECONDS
    assert watch() is None
