"""The optimizer and its learning rate. Knows the recipe's numbers and parameters; no loss."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from prorl_hpc.recipe import AlgorithmConfig


def build_optimizer(
    parameters: Iterable[nn.Parameter], *, config: AlgorithmConfig
) -> torch.optim.AdamW:
    """AdamW over all parameters, as the recipe says."""
    first, second = config.betas
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(first, second),
        weight_decay=config.weight_decay,
        foreach=False,
    )


def set_learning_rate(
    optimizer: torch.optim.Optimizer, *, config: AlgorithmConfig, step: int
) -> float:
    """Linear warm-up over the first steps, then constant; `step` counts from 0."""
    share = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps > 0 else 1.0
    rate = config.learning_rate * share
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def clip_gradients(parameters: Iterable[nn.Parameter], *, limit: float) -> float:
    """Scales gradients to a global norm of at most `limit` (0: unlimited); the norm before that."""
    from torch.distributed.tensor import DTensor

    norm: Tensor = nn.utils.clip_grad_norm_(
        parameters, limit if limit > 0 else math.inf, foreach=False
    )
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
