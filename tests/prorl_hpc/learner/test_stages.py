"""Stages: what holds at each step."""

import pytest

from hpc.errors import UserError
from prorl_hpc.learner.stages import StageValues, check_stages, next_boundary, stage_at
from prorl_hpc.recipe import StageConfig

STAGES = [
    StageConfig(from_step=100, num_rollouts=32),
    StageConfig(from_step=200, context_tokens=16384, num_rollouts=16),
    StageConfig(from_step=300, num_rollouts=24),
]


def at(step: int) -> StageValues:
    return stage_at(step, STAGES, context_tokens=8192, num_rollouts=16)


def test_a_stage_replaces_what_it_names() -> None:
    assert at(99) == StageValues(index=0, context_tokens=8192, num_rollouts=16)
    assert at(100) == StageValues(index=1, context_tokens=8192, num_rollouts=32)
    assert at(250) == StageValues(index=2, context_tokens=16384, num_rollouts=16)
    assert at(9999) == StageValues(index=3, context_tokens=16384, num_rollouts=24)


def test_boundaries() -> None:
    assert next_boundary(0, STAGES) == 100
    assert next_boundary(100, STAGES) == 200
    assert next_boundary(300, STAGES) is None
    assert next_boundary(0, []) is None


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([StageConfig(from_step=5), StageConfig(from_step=5)], r"stages\[1\]\.from_step=5"),
        ([StageConfig(from_step=-1)], "from_step=-1"),
        ([StageConfig(from_step=0, num_rollouts=1)], "num_rollouts=1 must be at least 2"),
        ([StageConfig(from_step=0, context_tokens=0)], "context_tokens=0"),
    ],
)
def test_mistakes_are_named(stages: list[StageConfig], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_stages(stages)
