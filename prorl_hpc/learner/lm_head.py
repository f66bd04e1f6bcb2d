"""Log-probabilities of given tokens from hidden states, without ever holding the full logits.

Knows one matrix and one softmax; no model, no loss. Shapes: M tokens, D hidden, V vocabulary.
logits_MV = hidden_MD @ weight_VD^T / temperature would be the largest tensor of a training step
(M = 16k and V = 152k in float32: 9.3 GiB, several times over in a plain backward). Here it exists
one chunk of tokens at a time, in the forward and, recomputed, in the backward pass.

Log-probabilities are those of logits / temperature (never log-probabilities / temperature), in at
least float32. Select the tokens that count before calling: prompts need no logits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from prorl_hpc.learner.algorithm_error import AlgorithmError

CHUNK_BYTES = 1 << 28
"""Size of one chunk of logits; a few of them live at a time."""


class TokenLogprobs(NamedTuple):
    """Per token: log-probability of the target and, if asked for, entropy (nats); [M] each."""

    logprobs: Tensor
    entropy: Tensor | None


def token_logprobs(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> TokenLogprobs:
    """Log-probabilities (and entropies) of the targets, differentiable in hidden and weight.

    `temperature` is one number or one per token, shape [M]. `chunk_tokens` bounds the tokens per
    chunk; None chooses it from the vocabulary and `CHUNK_BYTES`. The weight is used in the dtype
    of the hidden states; its gradient is accumulated in float32 (or float64).
    Raises `AlgorithmError` for a temperature that is not above 0 or shapes that disagree.
    """
    num_tokens = hidden_MD.shape[0]
    if hidden_MD.ndim != 2 or targets_M.shape != (num_tokens,):
        raise AlgorithmError(
            f"hidden {tuple(hidden_MD.shape)} and targets {tuple(targets_M.shape)} must be "
            "[tokens, hidden] and [tokens]"
        )
    work_dtype = torch.promote_types(hidden_MD.dtype, torch.float32)
    inverse_M = _inverse_temperature(temperature, num_tokens, hidden_MD.device, work_dtype)
    if chunk_tokens is None:
        bytes_per_token = weight_VD.shape[0] * torch.finfo(work_dtype).bits // 8
        chunk_tokens = CHUNK_BYTES // bytes_per_token
    logprobs_M, entropy_M = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden_MD, weight_VD, targets_M, inverse_M, with_entropy, max(1, chunk_tokens)
    )
    return TokenLogprobs(logprobs_M, entropy_M if with_entropy else None)


def _inverse_temperature(
    temperature: float | Tensor, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    if isinstance(temperature, Tensor):
        if temperature.shape != (num_tokens,):
            raise AlgorithmError(
                f"temperature has shape {tuple(temperature.shape)}; give one per token, "
                f"({num_tokens},)"
            )
        return temperature.detach().to(device, dtype).reciprocal()
    if not temperature > 0:
        raise AlgorithmError(f"temperature={temperature} must be above 0 for training")
    return torch.full((num_tokens,), 1.0 / temperature, device=device, dtype=dtype)


def _chunk_logits(hidden_CD: Tensor, weight_VD: Tensor, inverse_C: Tensor) -> Tensor:
    logits_CV = (hidden_CD @ weight_VD.to(hidden_CD.dtype).T).to(inverse_C.dtype)
    return logits_CV.mul_(inverse_C.unsqueeze(-1))


class _ChunkedHead(torch.autograd.Function):
    """y = log softmax(z)[target], H = -sum p log p, with z recomputed chunk by chunk.

    dy/dz = onehot - p;  dH/dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        targets_M: Tensor,
        inverse_M: Tensor,
        with_entropy: bool,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden_MD.shape[0]
        logprobs_M = inverse_M.new_empty(num_tokens)
        lse_M = inverse_M.new_empty(num_tokens)
        entropy_M = inverse_M.new_zeros(num_tokens if with_entropy else 0)
        with torch.autocast(hidden_MD.device.type, enabled=False):
            for start in range(0, num_tokens, chunk_tokens):
                part = slice(start, min(start + chunk_tokens, num_tokens))
                logits_CV = _chunk_logits(hidden_MD[part], weight_VD, inverse_M[part])
                lse_C = logits_CV.logsumexp(-1)
                target_C = logits_CV.gather(-1, targets_M[part].unsqueeze(-1)).squeeze(-1)
                logprobs_M[part] = target_C - lse_C
                lse_M[part] = lse_C
                if with_entropy:
                    entropy_M[part] = _entropy(logits_CV, lse_C)
        ctx.save_for_backward(hidden_MD, weight_VD, targets_M, inverse_M, lse_M, entropy_M)
        # An entropy that is only reported must not cost a pass of the backward.
        ctx.set_materialize_grads(False)
        ctx.chunk_tokens = chunk_tokens
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        gradient_M, gradient_entropy_M = gradients
        hidden_MD, weight_VD, targets_M, inverse_M, lse_M, entropy_M = ctx.saved_tensors
        if gradient_M is None:
            gradient_M = torch.zeros_like(lse_M)
        if not entropy_M.numel():
            gradient_entropy_M = None
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_MD = torch.empty_like(hidden_MD) if needs_hidden else None
        grad_weight_VD = (
            torch.zeros_like(weight_VD, dtype=inverse_M.dtype) if needs_weight else None
        )
        with torch.autocast(hidden_MD.device.type, enabled=False):
            weight_cast_VD = weight_VD.to(hidden_MD.dtype)
            for start in range(0, hidden_MD.shape[0], ctx.chunk_tokens):
                part = slice(start, min(start + ctx.chunk_tokens, hidden_MD.shape[0]))
                logp_CV = _chunk_logits(hidden_MD[part], weight_cast_VD, inverse_M[part])
                logp_CV.sub_(lse_M[part].unsqueeze(-1))
                gradient_CV = _logits_gradient(
                    logp_CV,
                    targets_M[part],
                    gradient_M[part],
                    None if gradient_entropy_M is None else gradient_entropy_M[part],
                    None if gradient_entropy_M is None else entropy_M[part],
                ).mul_(inverse_M[part].unsqueeze(-1))
                low_CV = gradient_CV.to(hidden_MD.dtype)
                if grad_hidden_MD is not None:
                    grad_hidden_MD[part] = low_CV @ weight_cast_VD
                if grad_weight_VD is not None:
                    _accumulate(grad_weight_VD, low_CV, hidden_MD[part])
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_MD, grad_weight_VD, None, None, None, None


def _accumulate(total_VD: Tensor, gradient_CV: Tensor, hidden_CD: Tensor) -> None:
    if total_VD.dtype == gradient_CV.dtype:
        # In place: a product of its own would double the largest buffer of the backward pass.
        total_VD.addmm_(gradient_CV.T, hidden_CD)
    else:
        total_VD.add_(gradient_CV.T @ hidden_CD)


def _entropy(logits_CV: Tensor, lse_C: Tensor) -> Tensor:
    """H = lse - sum p z; p reuses no buffer of z because z is still read."""
    probability_CV = (logits_CV - lse_C.unsqueeze(-1)).exp_()
    return lse_C - probability_CV.mul_(logits_CV).sum(-1)


def _logits_gradient(
    logp_CV: Tensor,
    targets_C: Tensor,
    gradient_C: Tensor,
    gradient_entropy_C: Tensor | None,
    entropy_C: Tensor | None,
) -> Tensor:
    """g (onehot - p) - g_H p (log p + H); consumes `logp_CV`."""
    if gradient_entropy_C is None or entropy_C is None:
        gradient_CV = logp_CV.exp_().mul_(-gradient_C.unsqueeze(-1))
    else:
        probability_CV = logp_CV.exp()
        factor_CV = logp_CV.add_(entropy_C.unsqueeze(-1)).mul_(gradient_entropy_C.unsqueeze(-1))
        factor_CV.add_(gradient_C.unsqueeze(-1))
        gradient_CV = probability_CV.mul_(factor_CV).neg_()
    return gradient_CV.scatter_add_(-1, targets_C.unsqueeze(-1), gradient_C.unsqueeze(-1))
