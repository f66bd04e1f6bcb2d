"""Evaluation estimators: by hand, by enumeration, and seeded."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc.errors import UserError
from prorl_hpc.evaluation.estimators import blended_score, bootstrap_interval, pass_at_k

# A loaded machine is slow, never wrong.
REPEATABLE = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow],
}


def test_pass_at_k_by_hand() -> None:
    # 1 correct of 4: k=1 is 1/4; k=2 is 1 - C(3,2)/C(4,2) = 1 - 3/6.
    assert pass_at_k(4, 1, k=1) == pytest.approx(0.25)
    assert pass_at_k(4, 1, k=2) == pytest.approx(0.5)
    assert pass_at_k(4, 0, k=3) == 0.0
    assert pass_at_k(4, 2, k=3) == 1.0
    assert 0 < pass_at_k(10_000, 1, k=5_000) < 1


@settings(max_examples=40, **REPEATABLE)
@given(n=st.integers(1, 8), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n: int, data) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    samples = [True] * c + [False] * (n - c)
    subsets = list(itertools.combinations(samples, k))
    assert pass_at_k(n, c, k=k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_mistakes() -> None:
    with pytest.raises(UserError, match="pass@5 needs at least 5 samples"):
        pass_at_k(4, 1, k=5)
    with pytest.raises(UserError, match="5 correct of 4"):
        pass_at_k(4, 5, k=1)


def test_bootstrap_is_seeded_and_holds_the_mean() -> None:
    values = np.arange(20) / 20
    first = bootstrap_interval(values, seed=3)
    assert first == bootstrap_interval(values, seed=3)
    assert first.low < first.mean < first.high
    # Normal theory: half-width 1.96 sigma / sqrt(P); the percentile bootstrap is close to it.
    half_width = 1.96 * values.std() / math.sqrt(20)
    assert first.high - first.low == pytest.approx(2 * half_width, rel=0.1)


def test_bootstrap_of_equal_values_and_of_one() -> None:
    assert bootstrap_interval([0.5, 0.5], seed=0) == (0.5, 0.5, 0.5)
    assert bootstrap_interval([1.0], seed=0) == (1.0, 1.0, 1.0)
    for bad in ([], [math.nan], [[1.0]]):
        with pytest.raises(UserError, match="at least one finite number"):
            bootstrap_interval(bad, seed=0)
    with pytest.raises(UserError, match="confidence=95"):
        bootstrap_interval([1.0], seed=0, confidence=95)


def test_blended_score_by_hand() -> None:
    # (3 * 0.5 + 1 * 0.1) / 4; the task of weight 0 needs no score.
    weights = {"logic": 3.0, "math": 1.0, "swe": 0.0}
    assert blended_score({"logic": 0.5, "math": 0.1}, weights) == pytest.approx(0.4)


def test_blended_score_refuses_a_smaller_blend() -> None:
    with pytest.raises(UserError, match="no finite validation score for math"):
        blended_score({"logic": 0.5}, {"logic": 1.0, "math": 1.0})
    with pytest.raises(UserError, match="no finite validation score for math"):
        blended_score({"math": math.nan}, {"math": 1.0})
    with pytest.raises(UserError, match="no positive finite entry"):
        blended_score({}, {"math": 0.0})
