"""Sums that describe a policy loss, made so that micro-batches and ranks can simply be added.

Pure; knows no logger. Shapes: M tokens that count.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from prorl_hpc.learner.surrogate import SurrogateLoss

_NOT_PER_TOKEN = frozenset({"tokens", "sequences", "loss", "masked_nonfinite"})


def surrogate_sums(
    log_ratio_M: Tensor,
    surrogate: SurrogateLoss,
    weight_M: Tensor,
    *,
    old_M: Tensor,
    sampler_M: Tensor | None,
    num_sequences: int,
) -> dict[str, float]:
    """Sums over the tokens: surrogate, ratio, clipping, correction, gap to the sampler."""
    ratio_log_M = log_ratio_M.detach()
    named = {
        "surrogate": surrogate.loss.detach().sum(),
        "ratio": ratio_log_M.exp().sum(),
        # k3 of the step itself: how far this update has moved from the policy of the batch.
        "update_kl": (torch.expm1(ratio_log_M) - ratio_log_M).sum(),
        "clipped_low": surrogate.clipped_low.sum(),
        "clipped_high": surrogate.clipped_high.sum(),
        "correction_weight": weight_M.sum(),
        "correction_dropped": (weight_M == 0).sum(),
    }
    if sampler_M is not None:
        named["sampler_gap"] = (old_M - sampler_M).abs().sum()
    # One transfer from the device instead of one per metric.
    values = torch.stack([value.to(torch.float64) for value in named.values()]).tolist()
    sums = dict(zip(named, values, strict=True))
    sums["tokens"] = float(log_ratio_M.numel())
    sums["sequences"] = float(num_sequences)
    return sums


def add_sums(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    """Metrics of two micro-batches (or ranks) as those of both."""
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in sorted({*left, *right})}


def mean_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Per-token means of summed metrics; counts and the loss, already a share, stay sums."""
    tokens = max(sums.get("tokens", 0.0), 1.0)
    return {
        name: value if name in _NOT_PER_TOKEN else value / tokens for name, value in sums.items()
    }
