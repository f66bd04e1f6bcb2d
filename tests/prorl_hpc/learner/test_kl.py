"""KL estimators: hand-computed values, and expectations by full enumeration of a categorical."""

import math

import pytest
import torch

from prorl_hpc.choices import KlEstimator
from prorl_hpc.learner.kl import importance_weighted_kl, kl_estimate, kl_reward_penalty

F64 = torch.float64
K1, K2, K3 = KlEstimator.k1, KlEstimator.k2, KlEstimator.k3


def test_values_by_hand() -> None:
    # d = 0.5 and -1: k2 = d^2/2; k3 = e^-d - 1 + d.
    new, reference = torch.tensor([-1.0, -2.0], dtype=F64), torch.tensor([-1.5, -1.0], dtype=F64)
    assert kl_estimate(new, reference, estimator=K1).tolist() == pytest.approx([0.5, -1.0])
    assert kl_estimate(new, reference, estimator=K2).tolist() == pytest.approx([0.125, 0.5])
    assert kl_estimate(new, reference, estimator=K3).tolist() == pytest.approx(
        [math.exp(-0.5) - 0.5, math.e - 2]
    )


@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_zero_exactly_when_policy_is_reference(estimator: KlEstimator) -> None:
    logprobs = torch.randn(64).requires_grad_()
    kl = kl_estimate(logprobs, logprobs.detach(), estimator=estimator)
    assert torch.equal(kl, torch.zeros(64))


def test_clamps_hold_value_and_gradient_at_a_large_gap() -> None:
    new = torch.tensor([-900.0, -0.1]).requires_grad_()
    kl = kl_estimate(new, torch.tensor([-0.1, -900.0]), estimator=K3)
    assert kl.tolist() == [10.0, 10.0]  # input +-20, output 10
    kl.sum().backward()
    assert torch.equal(new.grad, torch.zeros(2))


def test_unclamped_k3_overflows() -> None:
    """What the clamp is for: the value is infinite and the gradient not finite."""
    new = torch.tensor([-900.0]).requires_grad_()
    kl = kl_estimate(new, torch.tensor([-0.1]), estimator=K3, input_clamp=None, output_clamp=None)
    kl.sum().backward()
    assert math.isinf(kl.item())
    assert not torch.isfinite(new.grad).all()


def policies() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = [0.4 * torch.randn(5, dtype=F64, generator=generator) for _ in range(3)]
    return draw[0].requires_grad_(), draw[1].log_softmax(0), draw[2].log_softmax(0)


def exact_gradient(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Gradient of the true divergence, by autograd of its definition."""
    logp = logits.log_softmax(0)
    return torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits)[0]


def test_k2_has_the_unbiased_gradient_on_policy() -> None:
    logits, reference, _ = policies()
    logp = logits.log_softmax(0)
    # Expectation over on-policy samples: probabilities are weights, not part of the graph.
    loss = (logp.detach().exp() * kl_estimate(logp, reference, estimator=K2)).sum()
    gradient = torch.autograd.grad(loss, logits)[0]
    assert torch.allclose(gradient, exact_gradient(logits, reference), atol=1e-12)


@pytest.mark.parametrize("estimator", [K1, K3])
def test_k1_and_k3_as_a_loss_are_biased_on_policy(estimator: KlEstimator) -> None:
    logits, reference, _ = policies()
    logp = logits.log_softmax(0)
    loss = (logp.detach().exp() * kl_estimate(logp, reference, estimator=estimator)).sum()
    gradient = torch.autograd.grad(loss, logits)[0]
    assert not torch.allclose(gradient, exact_gradient(logits, reference), atol=1e-3)


@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_importance_weighted_form_is_unbiased_off_policy(estimator: KlEstimator) -> None:
    logits, reference, behaviour = policies()
    logp = logits.log_softmax(0)
    kl = kl_estimate(logp, reference, estimator=estimator)
    weighted = importance_weighted_kl(kl, logp, behaviour, estimator=estimator)
    gradient = torch.autograd.grad((behaviour.exp() * weighted).sum(), logits)[0]
    assert torch.allclose(gradient, exact_gradient(logits, reference), atol=1e-12)


@pytest.mark.parametrize("estimator", [K1, K3])
def test_k1_and_k3_are_unbiased_in_value(estimator: KlEstimator) -> None:
    logits, reference, behaviour = policies()
    logp = logits.detach().log_softmax(0)
    exact = (logp.exp() * (logp - reference)).sum()
    kl = kl_estimate(logp, reference, estimator=estimator)
    assert (logp.exp() * kl).sum().item() == pytest.approx(exact.item())
    weighted = importance_weighted_kl(kl, logp, behaviour, estimator=estimator)
    assert (behaviour.exp() * weighted).sum().item() == pytest.approx(exact.item())


def test_reward_penalty_sums_over_the_sequence_and_ignores_masked_tokens() -> None:
    new = torch.tensor([-1.0, math.nan, -1.0, -2.0, -5.0], dtype=F64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -1.25, -1.0, -1.0], dtype=F64)
    penalty = kl_reward_penalty(
        new,
        reference,
        torch.tensor([1, 0, 1, 1, 0]),
        torch.tensor([0, 0, 0, 1, 1]),
        num_sequences=3,
        coefficient=0.1,
        estimator=K1,
    )
    # Sequence 0: 0.5 + 0.25; sequence 1: -1; sequence 2 has no token.
    assert penalty.tolist() == pytest.approx([0.075, -0.1, 0.0])
    assert not penalty.requires_grad
