"""Off-policy weights and staleness, by hand."""

import pytest
import torch

from hpc.errors import UserError
from prorl_hpc.choices import Correction, StalePolicy
from prorl_hpc.learner.correction import correction_weights, decide_staleness

F64 = torch.float64
RATIOS = torch.tensor([0.25, 1.0, 4.0, 8.0], dtype=F64)
INDEX = torch.tensor([0, 0, 1, 1])


def weights(correction: Correction, low: float = 0.5, high: float = 5.0) -> list[float]:
    sampler = torch.full((4,), -3.0, dtype=F64)
    return correction_weights(
        sampler + RATIOS.log(),
        sampler,
        INDEX,
        correction=correction,
        num_sequences=2,
        low=low,
        high=high,
    ).tolist()


def test_weights_by_hand() -> None:
    assert weights(Correction.none) == [1, 1, 1, 1]
    assert weights(Correction.truncated, high=2.0) == pytest.approx([0.25, 1, 2, 2])
    assert weights(Correction.icepop) == pytest.approx([0, 1, 4, 0])
    assert weights(Correction.decoupled) == pytest.approx([0.25, 1, 4, 8])
    # Geometric means: sqrt(0.25) = 0.5 and sqrt(32) = 5.66; only the first lies in [0.4, 5].
    assert weights(Correction.sequence_mask, low=0.4) == pytest.approx([0.25, 1, 0, 0])


def test_weights_are_constant_in_theta_and_finite_at_any_gap() -> None:
    old = torch.tensor([-0.1, -700.0], dtype=F64, requires_grad=True)
    sampler = torch.tensor([-800.0, -0.1], dtype=F64)
    result = correction_weights(
        old,
        sampler,
        torch.tensor([0, 0]),
        correction=Correction.decoupled,
        num_sequences=1,
        low=0,
        high=1,
    )
    assert not result.requires_grad
    assert torch.isfinite(result).all()


def test_stale_groups_are_dropped_whole() -> None:
    decision = decide_staleness(
        [10, 7, 10, 9, None],
        [1, 1, 2, 2, 3],
        learner_version=10,
        max_staleness=2,
        policy=StalePolicy.drop,
    )
    assert decision.keep.tolist() == [False, False, True, True, True]
    assert (decision.num_stale_groups, decision.max_staleness) == (1, 3)


def test_stale_groups_stay_when_they_are_corrected() -> None:
    decision = decide_staleness(
        [10, 7], [1, 1], learner_version=10, max_staleness=2, policy=StalePolicy.correct
    )
    assert decision.keep.tolist() == [True, True]
    assert decision.num_stale_groups == 1


def test_staleness_of_nothing_and_of_the_future() -> None:
    empty = decide_staleness([], [], learner_version=3, max_staleness=0, policy=StalePolicy.drop)
    assert empty.keep.tolist() == []
    with pytest.raises(UserError, match="policy version 4, newer than the learner's 3"):
        decide_staleness([4], [0], learner_version=3, max_staleness=0, policy=StalePolicy.drop)
