"""What the learner writes for people, read back with the tools that people use."""

from pathlib import Path

import pytest

from prorl_hpc.buffer.messages import GroupIds
from prorl_hpc.learner.checkpoint import LearnerState
from prorl_hpc.learner.filtering import EffectiveSamples
from prorl_hpc.learner.record import Recorder
from prorl_hpc.observe.metrics import read_metrics
from prorl_hpc.run import Run

pytest.importorskip("tensorboard")


def state_at(step: int) -> LearnerState:
    return LearnerState(
        step=step, version=step, consumed=GroupIds(), filtered=0, samples=EffectiveSamples(),
        reset={}, reference=None, has_moments=True,
    )  # fmt: skip


def test_tensorboard_reads_the_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Run(tmp_path)
    recorder = Recorder(run)
    for step, reward in ((1, 0.25), (2, 0.5)):
        recorder.step(state_at(step), {"reward": reward, "kl": 0.0}, {"sums": {"solved": reward}})
    recorder.close()
    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    for name in ("learner/reward", "sums/solved"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(1, 0.25), (2, 0.5)]
    assert [row["reward"] for row in read_metrics(run.metrics("learner"))] == [0.25, 0.5]
