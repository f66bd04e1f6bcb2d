"""Advantages: hand-computed groups, degenerate groups, invariances."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc.errors import UserError
from prorl_hpc.choices import Estimator
from prorl_hpc.learner.advantage import compute_advantages

# A loaded machine is slow, never wrong.
REPEATABLE = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow],
}

ALL = list(Estimator)
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 1.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, 7, 7, 2, 2])


def advantages(rewards, groups, estimator):
    return compute_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), estimator=estimator
    ).tolist()


def test_grpo_by_hand() -> None:
    # Group 7: mean 0.5, std sqrt(4 * 0.25 / 3) = sqrt(1/3). Group 2: mean 2, std sqrt(2).
    result = compute_advantages(REWARDS, GROUPS, estimator="grpo").tolist()
    first = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    second = 1 / (math.sqrt(2) + 1e-6)
    assert result == pytest.approx([first, -first, -first, first, second, -second], rel=1e-12)


def test_dr_grpo_by_hand() -> None:
    result = compute_advantages(REWARDS, GROUPS, estimator="dr_grpo").tolist()
    assert result == pytest.approx([0.5, -0.5, -0.5, 0.5, 1.0, -1.0])


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    # Group 7: 1 - (0+0+1)/3 = 2/3 and 0 - 2/3. Group 2: 3 - 1 and 1 - 3.
    result = compute_advantages(REWARDS, GROUPS, estimator="rloo").tolist()
    assert result == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3, 2.0, -2.0])


def test_reinforce_pp_baseline_by_hand() -> None:
    # Centred: .5 -.5 -.5 .5 1 -1; mean 0; variance (4 * .25 + 2) / 5 = 0.6.
    result = compute_advantages(REWARDS, GROUPS, estimator="reinforce_pp_baseline").tolist()
    scale = math.sqrt(0.6) + 1e-6
    expected = [value / scale for value in (0.5, -0.5, -0.5, 0.5, 1.0, -1.0)]
    assert result == pytest.approx(expected, rel=1e-12)


def test_reinforce_pp_baseline_counts_groups_without_spread() -> None:
    # Centred: .5 -.5 0 0; variance (0.25 * 2) / 3.
    result = advantages([1, 0, 1, 1], [0, 0, 1, 1], "reinforce_pp_baseline")
    scale = math.sqrt(0.5 / 3) + 1e-6
    assert result == pytest.approx([0.5 / scale, -0.5 / scale, 0, 0])


def test_maxrl_by_hand() -> None:
    # One success of four: (n-K)/K = 3 for it, -1 for the failures.
    assert advantages([1, 0, 0, 0], [0] * 4, "maxrl") == pytest.approx([3, -1, -1, -1])
    # Mean 2: (3-2)/2 and (1-2)/2.
    assert advantages([3, 1], [0, 0], "maxrl") == pytest.approx([0.5, -0.5])
    # No success to learn from: the mean is not positive.
    assert advantages([-1, 0], [0, 0], "maxrl") == [0, 0]


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize(
    "rewards",
    [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.3, 0.3 + 1e-7, 0.3], [math.nan, math.inf, 1.0]],
)
def test_groups_without_signal_get_zero(estimator: Estimator, rewards: list[float]) -> None:
    assert advantages(rewards, [5, 5, 5], estimator) == [0, 0, 0]


@pytest.mark.parametrize("estimator", ALL)
def test_single_rollout_and_empty_batch(estimator: Estimator) -> None:
    assert advantages([1.0], [0], estimator) == [0]
    empty = torch.zeros(0, dtype=torch.float64)
    assert compute_advantages(
        empty, torch.zeros(0, dtype=torch.int64), estimator=estimator
    ).shape == (0,)


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_rewards_are_excluded(estimator: Estimator, bad: float) -> None:
    with_bad = advantages([1.0, bad, 0.0, 2.0, 4.0], [0, 0, 0, 1, 1], estimator)
    without = advantages([1.0, 0.0, 2.0, 4.0], [0, 0, 1, 1], estimator)
    assert with_bad[1] == 0
    assert with_bad[:1] + with_bad[2:] == pytest.approx(without)


def test_dtype_is_kept_and_statistics_are_float64() -> None:
    result = compute_advantages(REWARDS.float(), GROUPS, estimator="grpo")
    assert result.dtype == torch.float32


def test_mistakes_are_user_errors() -> None:
    with pytest.raises(UserError, match=r"algorithm\.estimator='ppo' is unknown"):
        compute_advantages(REWARDS, GROUPS, estimator="ppo")
    with pytest.raises(UserError, match="one length"):
        compute_advantages(REWARDS, GROUPS[:3], estimator="grpo")


groups_of_rewards = st.lists(
    st.tuples(st.integers(0, 3), st.floats(-4, 4, allow_nan=False, width=32)),
    min_size=2,
    max_size=16,
)


@pytest.mark.parametrize("estimator", [e for e in ALL if e is not Estimator.maxrl])
@settings(max_examples=40, **REPEATABLE)
@given(items=groups_of_rewards, shift=st.floats(-2, 2, width=32))
def test_shift_invariance(estimator: Estimator, items, shift: float) -> None:
    """A constant added to all rewards changes nothing (MaxRL depends on the level by design)."""
    ids, rewards = zip(*items, strict=True)
    plain = advantages(rewards, ids, estimator)
    moved = advantages([r + shift for r in rewards], ids, estimator)
    spread = [max(r for i, r in items if i == k) - min(r for i, r in items if i == k) for k in ids]
    if min(s for s in [*spread, 1.0] if s > 0) > 1e-3:  # away from the threshold for "no spread"
        assert moved == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize("estimator", ALL)
@settings(max_examples=40, **REPEATABLE)
@given(items=groups_of_rewards, data=st.data())
def test_permutation_and_relabelling(estimator: Estimator, items, data) -> None:
    ids, rewards = zip(*items, strict=True)
    order = data.draw(st.permutations(range(len(items))))
    plain = advantages(rewards, ids, estimator)
    moved = advantages([rewards[i] for i in order], [100 - ids[i] for i in order], estimator)
    assert moved == pytest.approx([plain[i] for i in order], abs=1e-9)


@pytest.mark.parametrize("estimator", [Estimator.grpo, Estimator.dr_grpo, Estimator.rloo])
@settings(max_examples=40, **REPEATABLE)
@given(items=groups_of_rewards)
def test_advantages_of_a_group_sum_to_zero(estimator: Estimator, items) -> None:
    ids, rewards = zip(*items, strict=True)
    result = advantages(rewards, ids, estimator)
    for group in set(ids):
        total = sum(a for a, i in zip(result, ids, strict=True) if i == group)
        assert total == pytest.approx(0, abs=1e-8)
