"""In deterministic mode an interrupted run ends with the very weights of an uninterrupted one."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc.attempts import Next
from tests.prorl_hpc.run_helpers import Session

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800)]

STEPS = 14
DETERMINISTIC = [
    f"steps={STEPS}",
    "learner.deterministic=true",
    "algorithm.max_staleness=0",
    "algorithm.reset.every_steps=5",
]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Session, Session]]:
    sessions = (
        Session(runs=tmp_path, name="quiet", overrides=DETERMINISTIC),
        Session(runs=tmp_path, name="troubled", overrides=DETERMINISTIC),
    )
    yield sessions
    for session in sessions:
        session.end()


def test_interruptions_leave_no_trace_in_the_weights(pair: tuple[Session, Session]) -> None:
    quiet, troubled = pair
    quiet.submit("--wait")
    troubled.submit()
    troubled.wait_step(3)
    troubled.kill("learner")
    troubled.wait(lambda: troubled.ends("learner"), what="the learner's death is noticed")
    troubled.wait_step(7)
    _warn_of_the_walltime(troubled)
    troubled.wait_step(10)
    troubled.cli("cancel", troubled.name)
    troubled.wait_end()
    assert troubled.step < STEPS
    troubled.cli("resume", troubled.name)
    troubled.wait_end()
    assert [row["step"] for row in quiet.rows("reset")] == [5, 10]
    assert [row["step"] for row in troubled.rows("reset")] == [5, 10]
    assert quiet.state().reference == troubled.state().reference
    for session in pair:
        session.audit(steps=STEPS, batch_groups=4)
    scores = [[row["score"] for row in s.rows("validation")] for s in pair]
    assert scores[0] == scores[1]
    assert quiet.weights() == troubled.weights()


def _warn_of_the_walltime(session: Session) -> None:
    """What Slurm and the supervisor send ahead of the walltime: save, end, come back."""
    attempts = len(session.ends("learner"))
    session.signal_script("learner", signal.SIGUSR2)
    session.wait(lambda: len(session.ends("learner")) > attempts, what="the learner saves and ends")
    end = session.ends("learner")[-1]
    assert (end.code, end.next, end.asked) == (75, Next.again, "USR2"), end
