"""Aggregation: three denominators by hand, and no dependence on the split."""

import pytest
import torch

from hpc.errors import UserError
from prorl_hpc.choices import Aggregation
from prorl_hpc.learner.aggregate import aggregate, local_denominator

F64 = torch.float64
LOSS = torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=F64)
INDEX = torch.tensor([0, 0, 0, 1])


def test_three_means_by_hand() -> None:
    valid = torch.ones(4, dtype=torch.bool)
    expected = {
        Aggregation.token_mean: (4.0, 16 / 4),
        Aggregation.sequence_mean: (2.0, (2 + 10) / 2),
        Aggregation.constant: (200.0, 16 / 200),
    }
    for kind, (denominator, value) in expected.items():
        local = local_denominator(valid, INDEX, aggregation=kind, constant_tokens=100)
        assert local == denominator
        result = aggregate(LOSS, INDEX, aggregation=kind, denominator=local, num_sequences=2)
        assert result.item() == pytest.approx(value)


def test_sequences_without_a_valid_token_do_not_count() -> None:
    valid = torch.tensor([1, 1, 0, 0])
    assert local_denominator(valid, INDEX, aggregation=Aggregation.sequence_mean) == 1.0
    assert local_denominator(valid, INDEX, aggregation=Aggregation.token_mean) == 2.0


def test_no_tokens_gives_a_connected_zero() -> None:
    leaf = torch.ones(3, dtype=F64, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    for denominator in (0.0, 5.0):
        loss = aggregate(
            leaf[none],
            none,
            aggregation=Aggregation.sequence_mean,
            denominator=denominator,
            num_sequences=0,
        )
        loss.backward()
        assert loss.item() == 0
    assert torch.equal(leaf.grad, torch.zeros(3, dtype=F64))


def test_mistakes() -> None:
    with pytest.raises(UserError, match=r"denominator=0\.0 for 4 tokens"):
        aggregate(
            LOSS,
            INDEX,
            aggregation=Aggregation.token_mean,
            denominator=0.0,
            num_sequences=2,
        )
    with pytest.raises(UserError, match="constant_tokens=None"):
        local_denominator(LOSS > 0, INDEX, aggregation=Aggregation.constant)
