"""Chunked head against the plain computation, values and gradients."""

import pytest
import torch

from hpc.errors import UserError
from prorl_hpc.learner.lm_head import token_logprobs

F64 = torch.float64


def make(num_tokens: int = 13, hidden: int = 8, vocabulary: int = 31, dtype=F64):
    generator = torch.Generator().manual_seed(0)
    hidden_MD = torch.randn(num_tokens, hidden, dtype=dtype, generator=generator)
    weight_VD = torch.randn(vocabulary, hidden, dtype=dtype, generator=generator)
    targets_M = torch.randint(vocabulary, (num_tokens,), generator=generator)
    return hidden_MD.requires_grad_(), weight_VD.requires_grad_(), targets_M


def plain(hidden_MD, weight_VD, targets_M, temperature):
    """The definition, with the full logits."""
    logits = hidden_MD @ weight_VD.T
    scale = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
    logp = (logits / scale).log_softmax(-1)
    return logp.gather(-1, targets_M[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 100, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6, "per token"])
def test_equals_the_plain_computation(chunk_tokens: int | None, temperature) -> None:
    hidden_MD, weight_VD, targets_M = make()
    if temperature == "per token":
        temperature = torch.linspace(0.5, 1.5, 13, dtype=F64)
    result = token_logprobs(
        hidden_MD,
        weight_VD,
        targets_M,
        temperature=temperature,
        with_entropy=True,
        chunk_tokens=chunk_tokens,
    )
    logprobs_M, entropy_M = plain(hidden_MD, weight_VD, targets_M, temperature)
    assert torch.allclose(result.logprobs, logprobs_M, atol=1e-12)
    assert torch.allclose(result.entropy, entropy_M, atol=1e-12)
    upstream = torch.linspace(-1, 2, 13, dtype=F64)
    ours = torch.autograd.grad(
        (upstream * result.logprobs + upstream.square() * result.entropy).sum(),
        (hidden_MD, weight_VD),
    )
    theirs = torch.autograd.grad(
        (upstream * logprobs_M + upstream.square() * entropy_M).sum(), (hidden_MD, weight_VD)
    )
    for left, right in zip(ours, theirs, strict=True):
        assert torch.allclose(left, right, atol=1e-11)


def test_gradcheck_without_entropy() -> None:
    hidden_MD, weight_VD, targets_M = make(5, 3, 7)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, targets_M, temperature=0.7, chunk_tokens=2).logprobs,
        (hidden_MD, weight_VD),
    )


def test_only_one_of_the_outputs_in_the_loss() -> None:
    hidden_MD, weight_VD, targets_M = make()
    expected = plain(hidden_MD, weight_VD, targets_M, 1.0)
    for number in (0, 1):
        result = token_logprobs(hidden_MD, weight_VD, targets_M, with_entropy=True, chunk_tokens=4)
        ours = torch.autograd.grad(result[number].sum(), (hidden_MD, weight_VD))
        theirs = torch.autograd.grad(
            expected[number].sum(), (hidden_MD, weight_VD), retain_graph=True
        )
        for left, right in zip(ours, theirs, strict=True):
            assert torch.allclose(left, right, atol=1e-11)


def test_no_entropy_unless_asked() -> None:
    assert token_logprobs(*make()).entropy is None


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_side_frozen(frozen: int) -> None:
    inputs = list(make())
    inputs[frozen] = inputs[frozen].detach()
    token_logprobs(*inputs, chunk_tokens=4).logprobs.sum().backward()
    assert inputs[frozen].grad is None
    assert inputs[1 - frozen].grad is not None


def test_bfloat16_hidden_with_float32_master_weight() -> None:
    hidden_MD, weight_VD, targets_M = make(dtype=torch.float32)
    low = hidden_MD.detach().bfloat16().requires_grad_()
    result = token_logprobs(low, weight_VD, targets_M, with_entropy=True, chunk_tokens=4)
    exact, _ = plain(hidden_MD, weight_VD, targets_M, 1.0)
    assert result.logprobs.dtype == torch.float32
    assert torch.allclose(result.logprobs, exact, atol=0.15)
    result.logprobs.sum().backward()
    assert low.grad.dtype == torch.bfloat16
    assert weight_VD.grad.dtype == torch.float32


def test_nothing_to_score() -> None:
    hidden_MD, weight_VD, targets_M = make(0)
    result = token_logprobs(hidden_MD, weight_VD, targets_M, with_entropy=True)
    (result.logprobs.sum() + result.entropy.sum()).backward()
    assert result.logprobs.shape == (0,)
    assert torch.equal(weight_VD.grad, torch.zeros_like(weight_VD))


def test_extreme_logits_stay_finite() -> None:
    hidden_MD, weight_VD, targets_M = make(dtype=torch.float32)
    result = token_logprobs(1e4 * hidden_MD, weight_VD, targets_M, with_entropy=True)
    (result.logprobs.sum() + result.entropy.sum()).backward()
    assert torch.isfinite(result.logprobs).all()
    assert torch.isfinite(weight_VD.grad).all()


class _Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """Largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor):
                self.num_elements = max(self.num_elements, item.numel())
        return result


@pytest.mark.parametrize(("chunk_tokens", "largest"), [(8, 8 * 50), (64, 64 * 50)])
def test_full_logits_never_exist_in_forward_or_backward(chunk_tokens: int, largest: int) -> None:
    """The largest tensor is one chunk of logits (all of them only when the chunk is all)."""
    hidden_MD, weight_VD, targets_M = make(64, 4, 50)
    with _Peak() as peak:
        result = token_logprobs(
            hidden_MD, weight_VD, targets_M, with_entropy=True, chunk_tokens=chunk_tokens
        )
        forward = peak.num_elements
        peak.num_elements = 0
        (result.logprobs.sum() + result.entropy.sum()).backward()
    assert (forward, peak.num_elements) == (largest, largest)


def test_mistakes_are_named() -> None:
    hidden_MD, weight_VD, targets_M = make()
    with pytest.raises(UserError, match=r"temperature=0\.0 must be above 0"):
        token_logprobs(hidden_MD, weight_VD, targets_M, temperature=0.0)
    with pytest.raises(UserError, match="one per token"):
        token_logprobs(hidden_MD, weight_VD, targets_M, temperature=torch.ones(2))
    with pytest.raises(UserError, match="targets"):
        token_logprobs(hidden_MD, weight_VD, targets_M[:3])
