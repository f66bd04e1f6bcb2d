"""Dynamic sampling: verdict per group, bounded refills, counters."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prorl_hpc.choices import OnExhausted
from prorl_hpc.learner.filtering import (
    EffectiveSamples,
    RefillAction,
    decide_refill,
    filter_groups,
)

# A loaded machine is slow, never wrong.
REPEATABLE = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow],
}


def test_verdicts_by_hand() -> None:
    nan = math.nan
    rewards = [1, 0, 1, 1, 0, 0, 1, nan, 0.2, nan, 0.4, 0.5]
    groups = [5, 5, 2, 2, 3, 3, 4, 4, 9, 9, 9, 8]
    result = filter_groups(rewards, groups)
    assert result.keep.tolist() == [True, True] + [False] * 6 + [True] * 3 + [False]
    assert (result.num_groups, result.num_kept) == (6, 2)
    assert (result.num_equal_high, result.num_equal_low, result.num_too_few) == (1, 1, 2)
    assert result.acceptance == pytest.approx(1 / 3)


def test_nothing_to_filter() -> None:
    result = filter_groups([], [])
    assert result.keep.tolist() == []
    assert result.acceptance == 0.0


@settings(max_examples=60, **REPEATABLE)
@given(
    items=st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0, math.nan]))),
    data=st.data(),
)
def test_order_of_rollouts_does_not_matter(items, data) -> None:
    order = data.draw(st.permutations(range(len(items))))
    plain = filter_groups([r for _, r in items], [g for g, _ in items])
    moved = filter_groups([items[i][1] for i in order], [items[i][0] for i in order])
    assert moved.keep.tolist() == [plain.keep[i] for i in order]
    assert moved.num_kept == plain.num_kept
    total = plain.num_kept + plain.num_equal_low + plain.num_equal_high + plain.num_too_few
    assert total == plain.num_groups


def decide(kept: int, seen: int, rounds: int, **changes):
    values = {"wanted_groups": 32, "max_rounds": 3, **changes}
    return decide_refill(kept_groups=kept, seen_groups=seen, rounds_used=rounds, **values)


def test_a_full_batch_trains() -> None:
    decision = decide(40, 64, 2)
    assert (decision.action, decision.train_groups) == (RefillAction.train, 32)


def test_refill_asks_for_what_is_missing_over_the_acceptance() -> None:
    # 24 of 32 kept: 8 missing at 75 percent is 10.67, so 11.
    decision = decide(24, 32, 1)
    assert (decision.action, decision.request_groups) == (RefillAction.refill, 11)


def test_refill_is_never_more_than_one_batch() -> None:
    assert decide(0, 32, 1).request_groups == 32
    assert decide(1, 64, 2).request_groups == 32


def test_exhausted_trains_a_partial_batch_of_a_usable_size() -> None:
    decision = decide(21, 96, 3, multiple_of=4)
    assert (decision.action, decision.train_groups) == (RefillAction.train_partial, 20)
    assert "21 of 96 groups carry a signal after 3 draws" in decision.reason


def test_exhausted_with_nothing_skips() -> None:
    assert decide(3, 96, 3, multiple_of=4).action is RefillAction.skip


def test_exhausted_can_fail_and_says_what_to_change() -> None:
    decision = decide(5, 96, 3, on_exhausted=OnExhausted.error)
    assert decision.action is RefillAction.fail
    assert "raise algorithm.max_refills" in decision.reason


@settings(max_examples=60, **REPEATABLE)
@given(yields=st.lists(st.integers(0, 32), min_size=1, max_size=12))
def test_a_step_always_ends(yields: list[int]) -> None:
    """Whatever each draw yields, a step decides after at most `max_rounds` draws."""
    kept = seen = 0
    for rounds in range(1, 4):
        kept += yields[rounds % len(yields)]
        seen += 32
        decision = decide(kept, seen, rounds)
        if decision.action is not RefillAction.refill:
            break
    assert decision.action is not RefillAction.refill


def test_counters() -> None:
    filtered = filter_groups([1, 0, 1, 1], [0, 0, 1, 1])
    counts = EffectiveSamples().add(filtered=filtered, stale_groups=2)
    counts = counts.add(trained_groups=1, trained_rollouts=2)
    assert counts == EffectiveSamples(
        seen_groups=2, kept_groups=1, trained_groups=1, trained_rollouts=2, stale_groups=2
    )
    assert counts.efficiency == 0.25
    assert EffectiveSamples().efficiency == 0.0
