"""Policy-gradient surrogates per token. Pure; aggregation, KL and correction live elsewhere.

Shapes: M tokens that count (masked ones were removed before), S sequences. `log_ratio_M` is
log pi_theta - log pi_old as `log_ratio` gives it; `advantages_M` is constant in theta. Every
function returns the per-token loss, to be minimised, and which tokens its clip silenced.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this before `exp`: e^20 is still finite in bfloat16."""


class SurrogateLoss(NamedTuple):
    """Per-token loss, and the tokens on which a bound was active; every field is [M]."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def log_ratio(new_M: Tensor, old_M: Tensor) -> Tensor:
    """log(pi_new / pi_old), clamped to +-20; the gradient is 0 beyond the clamp."""
    return (new_M - old_M).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ppo_clip(
    log_ratio_M: Tensor,
    advantages_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> SurrogateLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)).

    PPO, arXiv 1707.06347, equation 7; decoupled bounds (clip-higher) DAPO, arXiv 2503.14476,
    equation 10. `dual_clip` c > 1 bounds the loss of negative advantages by -A c
    (arXiv 1912.09729, section on the dual clip).
    """
    ratio_M = log_ratio_M.exp()
    bounded_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_M = torch.maximum(-advantages_M * ratio_M, -advantages_M * bounded_M)
    if dual_clip is not None:
        negative_M = advantages_M < 0
        loss_M = torch.where(negative_M, torch.minimum(loss_M, -advantages_M * dual_clip), loss_M)
    return SurrogateLoss(
        loss_M,
        (ratio_M < 1.0 - clip_low) & (advantages_M < 0),
        (ratio_M > 1.0 + clip_high) & (advantages_M > 0),
    )


def sequence_mean(values_M: Tensor, sequence_index_M: Tensor, *, num_sequences: int) -> Tensor:
    """Mean of the values of each sequence, shape [S]; a sequence without tokens has mean 0."""
    zeros_S = values_M.new_zeros(num_sequences)
    count_S = zeros_S.index_add(0, sequence_index_M, torch.ones_like(values_M))
    return zeros_S.index_add(0, sequence_index_M, values_M) / count_S.clamp(min=1)


def gspo(
    log_ratio_M: Tensor,
    advantages_M: Tensor,
    sequence_index_M: Tensor,
    *,
    num_sequences: int,
    clip_low: float,
    clip_high: float,
) -> SurrogateLoss:
    """PPO's clip on the sequence ratio s = exp(mean over the tokens of log r).

    GSPO, arXiv 2507.18071, equations 5 and 7. Each token carries its sequence's loss, so that
    the sequence mean of the losses is the paper's objective. Sequences must be whole here.
    """
    mean_S = sequence_mean(log_ratio_M, sequence_index_M, num_sequences=num_sequences)
    return ppo_clip(mean_S[sequence_index_M], advantages_M, clip_low=clip_low, clip_high=clip_high)


def cispo(
    log_ratio_M: Tensor,
    logprobs_M: Tensor,
    advantages_M: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> SurrogateLoss:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: no token loses its gradient.

    CISPO, MiniMax-M1, arXiv 2506.13585, equations 4 and 5; `clip_low=1` leaves the lower bound
    out, as the paper does.
    """
    ratio_M = log_ratio_M.detach().exp()
    weight_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high)
    return SurrogateLoss(
        -weight_M * advantages_M * logprobs_M,
        ratio_M < 1.0 - clip_low,
        ratio_M > 1.0 + clip_high,
    )
