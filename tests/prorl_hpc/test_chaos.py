"""kill -9 of every role at random moments of one run: nothing is lost, nothing is done twice."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.prorl_hpc.run_helpers import Session

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800)]

STEPS = 40
TARGETS = [
    ("buffer", 0, False),
    ("learner", 0, False),
    ("rollout", 0, False),
    ("rollout", 1, True),
    ("buffer", 0, True),
    ("learner", 0, True),
    ("rollout", 0, True),
]
"""(role, index, whether the job's script dies too, as on a lost node)."""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    made = Session(runs=tmp_path, name="chaos", overrides=[f"steps={STEPS}"])
    yield made
    made.end()


def test_every_role_killed_at_random_moments(session: Session) -> None:
    rng = random.Random(11)
    targets = rng.sample(TARGETS, len(TARGETS))
    # Many steps are left after the last of them, so that the run never ends before it is hurt.
    moments = sorted(rng.sample(range(1, STEPS // 2), len(targets)))
    session.submit()
    session.kill("learner")  # while the first policy is still being made
    for step, (role, index, whole) in zip(moments, targets, strict=True):
        with session.held(step):
            session.kill(role, index, whole=whole)
    with session.held(STEPS // 2):
        session.kill_supervisor()
    session.cli("resume", session.name)  # waits for what is still ending
    session.wait_end()
    for job in ("buffer", "rollout", "learner"):
        session.wait(lambda job=job: session.ends(job), what=f"{job} has ended")
        assert session.ends(job)[-1].code == 0, session.said()
    session.audit(steps=STEPS, batch_groups=4)
