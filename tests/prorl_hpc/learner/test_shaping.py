"""Reward shaping by hand: overlong, stop-properly, cosine on its schedule."""

import math

import numpy as np
import pytest

from hpc.errors import UserError
from prorl_hpc.learner.shaping import (
    cosine_is_on,
    cosine_length_reward,
    overlong_penalty,
    shape_rewards,
)
from prorl_hpc.recipe import ShapingConfig


def shape(config: ShapingConfig, update: int = 0):
    return shape_rewards(
        [1.0, 0.0, 1.0],
        [0, 50, 100],
        [True, True, False],
        config=config,
        max_tokens=100,
        update=update,
    )


def test_overlong_by_hand() -> None:
    # Max 100, buffer 20: free up to 80, half the penalty at 90, all of it from 100 on.
    penalty = overlong_penalty(
        np.array([10.0, 80, 90, 100, 130]), max_tokens=100, buffer_tokens=20, penalty=2.0
    )
    assert penalty.tolist() == pytest.approx([0, 0, -1, -2, -2])


def test_cosine_by_hand() -> None:
    # eta_max at 0, the middle at T/2, eta_min at T and beyond; cos(pi/3) = 1/2 at T/3.
    eta = cosine_length_reward(
        np.array([0.0, 50, 100, 400, 100 / 3]), max_tokens=100, eta_min=-1.0, eta_max=0.0
    )
    assert eta.tolist() == pytest.approx([0, -0.5, -1, -1, -0.25])


def test_schedule_on_for_two_off_for_three() -> None:
    on = [cosine_is_on(update, on_updates=2, off_updates=3) for update in range(8)]
    assert on == [True, True, False, False, False, True, True, False]


def test_terms_add_up() -> None:
    config = ShapingConfig(
        overlong_buffer_tokens=50,
        overlong_penalty=1.0,
        truncation_penalty=0.5,
        cosine_length_weight=0.1,
        cosine_on_steps=1,
        cosine_off_steps=1,
    )
    on = shape(config, update=2)
    # Third rollout: 1 - 1 (overlong) - 0.5 (not stopped) + 0.1 * -1.
    assert on.rewards.tolist() == pytest.approx([1.0, -0.05, -0.6])
    assert on.terms == pytest.approx(
        {"overlong": -1 / 3, "stop_properly": -1 / 6, "cosine_length": -0.05}
    )
    off = shape(config, update=3)
    assert off.rewards.tolist() == pytest.approx([1.0, 0.0, -0.5])
    assert "cosine_length" not in off.terms


def test_defaults_leave_the_reward_alone() -> None:
    result = shape(ShapingConfig())
    assert result.rewards.tolist() == [1.0, 0.0, 1.0]
    assert result.terms == {}


def test_the_raw_rewards_are_not_touched() -> None:
    raw = np.array([1.0])
    shape_rewards(
        raw, [100], [False], config=ShapingConfig(truncation_penalty=1.0), max_tokens=100, update=0
    )
    assert raw.tolist() == [1.0]


def test_empty_batch_and_non_finite_reward() -> None:
    config = ShapingConfig(truncation_penalty=1.0)
    assert shape_rewards([], [], [], config=config, max_tokens=9, update=0).rewards.size == 0
    kept = shape_rewards([math.nan], [3], [False], config=config, max_tokens=9, update=0)
    assert math.isnan(kept.rewards[0])  # left for the advantage to exclude


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match=r"overlong_buffer_tokens=0 must lie in 1\.\.100"):
        shape(ShapingConfig(overlong_penalty=1.0))
    with pytest.raises(UserError, match="differ in length"):
        shape_rewards([1.0], [1, 2], [True], config=ShapingConfig(), max_tokens=9, update=0)
