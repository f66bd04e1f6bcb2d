"""Surrogates: hand-computed losses, gradients by autograd against the analytic ones."""

import math

import pytest
import torch

from prorl_hpc.learner.surrogate import cispo, gspo, log_ratio, ppo_clip, sequence_mean

F64 = torch.float64


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def test_ppo_clip_by_hand() -> None:
    ratios = tensor(1.5, 1.5, 0.5, 0.5, 1.1)
    advantages = tensor(1.0, -1.0, 1.0, -1.0, 2.0)
    result = ppo_clip(ratios.log(), advantages, clip_low=0.2, clip_high=0.4)
    # 1.5 is clipped to 1.4 when A > 0 only; 0.5 is clipped to 0.8 when A < 0 only.
    assert result.loss.tolist() == pytest.approx([-1.4, 1.5, -0.5, 0.8, -2.2])
    assert result.clipped_high.tolist() == [True, False, False, False, False]
    assert result.clipped_low.tolist() == [False, False, False, True, False]


def test_ppo_gradient_is_minus_a_r_inside_and_zero_where_clipped() -> None:
    logs = tensor(1.5, 1.5, 0.5, 0.5, 1.1).log().requires_grad_()
    advantages = tensor(1.0, -1.0, 1.0, -1.0, 2.0)
    ppo_clip(logs, advantages, clip_low=0.2, clip_high=0.4).loss.sum().backward()
    # d(-A r)/d log r = -A r; 0 where the clip is active.
    assert logs.grad.tolist() == pytest.approx([0, 1.5, -0.5, 0, -2.2])


def test_dual_clip_bounds_negative_advantages() -> None:
    logs = tensor(10.0, 2.0, 10.0).log().requires_grad_()
    loss = ppo_clip(logs, tensor(-1.0, -1.0, 1.0), clip_low=0.2, clip_high=0.2, dual_clip=3.0).loss
    # -A r = 10 bounded by 3; 2 is under the bound; positive advantages keep the plain clip.
    assert loss.tolist() == pytest.approx([3.0, 2.0, -1.2])
    loss.sum().backward()
    assert logs.grad.tolist() == pytest.approx([0.0, 2.0, 0.0])


def test_log_ratio_is_clamped_with_zero_gradient_beyond() -> None:
    new = tensor(-1.0, -0.5).requires_grad_()
    result = log_ratio(new, tensor(-500.0, -1.0))
    assert result.tolist() == pytest.approx([20.0, 0.5])
    result.exp().sum().backward()
    assert new.grad[0] == 0
    assert new.grad[1].item() == pytest.approx(math.exp(0.5))


def test_gspo_by_hand() -> None:
    # Sequence 0: mean of log 2 and log 0.5 is 0, s = 1. Sequence 1: s = 1.1, clipped to 1.05.
    logs = tensor(2.0, 0.5, 1.1).log()
    index = torch.tensor([0, 0, 1])
    result = gspo(
        logs, tensor(1.0, 1.0, 2.0), index, num_sequences=2, clip_low=0.03, clip_high=0.05
    )
    assert result.loss.tolist() == pytest.approx([-1.0, -1.0, -2.1])


def test_gspo_gradient_is_spread_over_the_sequence() -> None:
    logs = tensor(1.2, 0.9).log().requires_grad_()
    index = torch.tensor([0, 0])
    loss = gspo(logs, tensor(1.5, 1.5), index, num_sequences=1, clip_low=0.2, clip_high=0.2).loss
    loss.mean().backward()
    # d(-A s)/d log r_t = -A s / |y|, s = sqrt(1.2 * 0.9).
    expected = -1.5 * math.sqrt(1.08) / 2
    assert logs.grad.tolist() == pytest.approx([expected, expected])


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    logprobs = tensor(-1.0, -2.0).requires_grad_()
    result = cispo(tensor(3.0, 0.1).log(), logprobs, tensor(2.0, -1.0), clip_low=1.0, clip_high=0.5)
    result.loss.sum().backward()
    # -sg(min(r, 1.5)) A: -1.5 * 2 and -0.1 * -1; no lower bound with clip_low = 1.
    assert logprobs.grad.tolist() == pytest.approx([-3.0, 0.1])
    assert result.loss.tolist() == pytest.approx([3.0, -0.2])
    assert result.clipped_high.tolist() == [True, False]


def test_sequence_mean_of_a_sequence_without_tokens_is_zero() -> None:
    means = sequence_mean(tensor(1.0, 3.0), torch.tensor([0, 0]), num_sequences=2)
    assert means.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("clip_high", [0.2, 0.4])
def test_gradcheck(clip_high: float) -> None:
    torch.manual_seed(0)
    advantages = torch.randn(7, dtype=F64)
    index = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    logs = (0.5 * torch.randn(7, dtype=F64)).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: ppo_clip(x, advantages, clip_low=0.2, clip_high=clip_high, dual_clip=3.0).loss,
        logs,
    )
    assert torch.autograd.gradcheck(
        lambda x: (
            gspo(x, advantages, index, num_sequences=3, clip_low=0.2, clip_high=clip_high).loss
        ),
        logs,
    )
