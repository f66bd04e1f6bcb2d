"""What a learner could not work with is refused before anything is queued."""

import dataclasses
from typing import Any

import pytest

from hpc.errors import UserError
from prorl_hpc.choices import Correction, KlPlace, StalePolicy
from prorl_hpc.learner.preflight import check_training, longest_of_run, longest_response
from prorl_hpc.recipe import (
    AlgorithmConfig,
    ModelConfig,
    Recipe,
    RolloutConfig,
    ShapingConfig,
    StageConfig,
    TaskConfig,
)
from prorl_hpc.relations import check_trainable


def recipe(**algorithm: Any) -> Recipe:
    """A single-turn task of 100 tokens and one of 20 turns of 50, at 800 tokens of context."""
    return Recipe(
        name="r",
        steps=3,
        tasks={
            "sums": TaskConfig(kind="logic"),
            "shell": TaskConfig(kind="cli", max_turns=20, max_new_tokens=50),
        },
        model=ModelConfig(context_tokens=800),
        rollout=RolloutConfig(max_new_tokens=100),
        algorithm=AlgorithmConfig(**algorithm),
    )


def test_the_longest_response_counts_all_turns_within_the_context() -> None:
    assert longest_response(recipe(), task="sums", context_tokens=800) == 100
    # 20 turns of 50 would be 1000; the conversation ends at its context.
    assert longest_response(recipe(), task="shell", context_tokens=800) == 800
    assert longest_response(recipe(), task="shell", context_tokens=4000) == 1000
    assert longest_response(recipe(), task="sums", context_tokens=60) == 60


def test_the_constant_of_a_run_is_that_of_its_longest_stage() -> None:
    assert longest_of_run(recipe()) == 800
    stages = [StageConfig(from_step=1, context_tokens=900), StageConfig(from_step=2)]
    assert longest_of_run(recipe(stages=stages)) == 900


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (
            {"shaping": ShapingConfig(overlong_penalty=1.0, overlong_buffer_tokens=101)},
            r"buffer_tokens=101 must lie in 1\.\.100, the longest response of task sums.* is 20 ",
        ),
        (
            {
                "shaping": ShapingConfig(overlong_penalty=1.0, overlong_buffer_tokens=80),
                "stages": [StageConfig(from_step=2, context_tokens=70)],
            },
            r"overlong_buffer_tokens=80 must lie in 1\.\.70",
        ),
        ({"stale": StalePolicy.correct}, "stale=correct with algorithm.correction=none trains"),
        ({"dual_clip": 0.5}, r"dual_clip=0\.5 must be above 1"),
        ({"correction_low": 6.0}, r"correction_low=6\.0"),
        ({"stages": [StageConfig(from_step=1, num_rollouts=1)]}, "num_rollouts=1 must be"),
        (
            {"kl_importance_weighted": True, "kl_place": KlPlace.reward},
            "kl_importance_weighted=true has no use",
        ),
        (
            {
                "shaping": ShapingConfig(
                    cosine_length_weight=0.1, cosine_on_steps=0, cosine_off_steps=0
                )
            },
            "cosine_on_steps=0 and cosine_off_steps=0 make no schedule",
        ),
    ],
)
def test_what_would_end_the_first_step_is_refused_at_submit(
    algorithm: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        check_trainable(recipe(**algorithm))


def test_what_can_work_is_left_alone() -> None:
    shaping = ShapingConfig(overlong_penalty=1.0, overlong_buffer_tokens=100)
    check_training(recipe(shaping=shaping))
    check_training(recipe(stale=StalePolicy.correct, correction=Correction.icepop))
    off = dataclasses.replace(shaping, overlong_penalty=0.0, overlong_buffer_tokens=9999)
    check_training(recipe(shaping=off))
