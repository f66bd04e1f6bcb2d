"""Packing: a partition within budget, equal counts per rank, balanced, deterministic."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc.errors import UserError
from prorl_hpc.learner.packing import pack, sequence_work

# A loaded machine is slow, never wrong.
REPEATABLE = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow],
}


def plan_of(lengths, token_budget=100, num_ranks=2, hidden_size=64):
    return pack(lengths, token_budget=token_budget, num_ranks=num_ranks, hidden_size=hidden_size)


def test_small_case_by_hand() -> None:
    # 60+40 and 50+50 fill two micro-batches of 100, one per rank.
    plan = plan_of([60, 50, 40, 50])
    assert sorted(plan.micro_batches) == [((0, 2),), ((1, 3),)]
    assert plan.token_efficiency == 1.0
    assert plan.num_dummies == 0


def test_work_by_hand() -> None:
    # 120 tokens, D = 10: 120 (1 + 120 / 120) = 240.
    assert sequence_work(120, hidden_size=10) == 240.0


def test_every_rank_gets_the_same_number_with_dummies_where_needed() -> None:
    plan = plan_of([90], num_ranks=4)
    assert [len(batches) for batches in plan.micro_batches] == [1, 1, 1, 1]
    assert plan.num_dummies == 3
    assert plan.token_efficiency == 0.9


def test_no_sequences_gives_one_dummy_per_rank() -> None:
    plan = plan_of([], num_ranks=3)
    assert plan.micro_batches == (((),), ((),), ((),))
    assert plan.num_dummies == 3
    assert plan.work_efficiency == plan.token_efficiency == 1.0


def test_long_sequences_are_balanced_by_work_not_by_tokens() -> None:
    """Four of 100 tokens cost as much as one of 200 when attention dominates."""
    plan = plan_of([200, 100, 100, 100, 100], token_budget=400, hidden_size=1, num_ranks=2)
    assert sorted(plan.micro_batches) == [((0,),), ((1, 2, 3, 4),)]
    assert plan.work_efficiency > 0.9


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match=r"sequence 1 has 101 tokens; tokens_per_micro_batch=100"):
        plan_of([5, 101])
    with pytest.raises(UserError, match="ranks=0"):
        plan_of([5], num_ranks=0)


lists_of_lengths = st.lists(st.integers(0, 100), max_size=60)


@settings(max_examples=100, **REPEATABLE)
@given(lengths=lists_of_lengths, num_ranks=st.integers(1, 5), hidden_size=st.integers(1, 64))
def test_partition_within_budget(lengths: list[int], num_ranks: int, hidden_size: int) -> None:
    plan = plan_of(lengths, num_ranks=num_ranks, hidden_size=hidden_size)
    flat = [i for batches in plan.micro_batches for batch in batches for i in batch]
    assert sorted(flat) == list(range(len(lengths)))
    assert len({len(batches) for batches in plan.micro_batches}) == 1
    assert len(plan.micro_batches) == num_ranks
    for batches in plan.micro_batches:
        for batch in batches:
            assert sum(lengths[i] for i in batch) <= 100
    assert 0 <= plan.work_efficiency <= 1 + 1e-12
    assert plan == plan_of(lengths, num_ranks=num_ranks, hidden_size=hidden_size)


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_efficiency_on_a_heavy_tailed_distribution(num_ranks: int) -> None:
    """Log-normal response lengths, cut at the context: packing wastes under 5 percent."""
    rng = random.Random(0)
    lengths = [min(8192, max(16, int(rng.lognormvariate(7.2, 0.9)))) for _ in range(2048)]
    plan = plan_of(lengths, token_budget=16384, num_ranks=num_ranks, hidden_size=1536)
    assert plan.token_efficiency >= 0.95
    assert plan.work_efficiency >= 0.95
