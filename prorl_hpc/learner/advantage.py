"""Rewards to advantages, per group of rollouts. Pure; knows nothing of tokens, models or ranks.

Shapes: N rollouts of one optimizer step, G groups. `rewards_N` and `group_ids_N` must hold the
whole step (all ranks): REINFORCE++-baseline normalises over it, and a group must not be split.

Degenerate cases, the same for every estimator: a non-finite reward leaves the statistics of its
group and gets advantage 0; a group with fewer than two finite rewards gets 0; so does a group
whose spread is at most `MIN_STD`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from prorl_hpc.choices import Estimator
from prorl_hpc.learner.algorithm_error import AlgorithmError

MIN_STD = 1e-6
"""A standard deviation (or, for MaxRL, a mean) up to this counts as no signal."""

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Groups:
    """Per-rollout view of the groups, over finite rewards only; every field is [N]."""

    count: Tensor
    mean: Tensor
    std: Tensor
    usable: Tensor
    """Finite reward, in a group with at least two finite rewards and some spread."""
    comparable: Tensor
    """Finite reward, in a group with at least two finite rewards."""


def compute_advantages(
    rewards_N: Tensor, group_ids_N: Tensor, *, estimator: Estimator | str
) -> Tensor:
    """Advantage of each rollout, in the dtype of the rewards; 0 where there is no signal.

    Raises `AlgorithmError` for an unknown estimator or shapes that disagree.
    """
    try:
        chosen = Estimator(estimator)
    except ValueError as err:
        names = ", ".join(item.value for item in Estimator)
        raise AlgorithmError(
            f"algorithm.estimator={estimator!r} is unknown; choose one of {names}"
        ) from err
    if rewards_N.ndim != 1 or rewards_N.shape != group_ids_N.shape:
        raise AlgorithmError(
            f"rewards {tuple(rewards_N.shape)} and group_ids {tuple(group_ids_N.shape)} "
            "must be one-dimensional and of one length"
        )
    # Group sums in float64: rewards are few, and the mean must not depend on their order.
    rewards = rewards_N.detach().to(torch.float64)
    finite_N = torch.isfinite(rewards)
    clean_N = torch.where(finite_N, rewards, torch.zeros_like(rewards))
    groups = _describe(clean_N, finite_N, group_ids_N)
    advantages_N = _FORMULAS[chosen](clean_N, groups)
    return advantages_N.to(rewards_N.dtype)


def _describe(clean_N: Tensor, finite_N: Tensor, group_ids_N: Tensor) -> _Groups:
    _, index_N = torch.unique(group_ids_N, return_inverse=True)
    num_groups = int(index_N.max()) + 1 if index_N.numel() else 0
    zeros_G = clean_N.new_zeros(num_groups)
    present_N = finite_N.to(clean_N.dtype)
    count_G = zeros_G.index_add(0, index_N, present_N)
    mean_G = zeros_G.index_add(0, index_N, clean_N) / count_G.clamp(min=1)
    centred_N = (clean_N - mean_G[index_N]) * present_N
    # Unbiased (ddof 1), as in the public GRPO implementations.
    variance_G = zeros_G.index_add(0, index_N, centred_N.square()) / (count_G - 1).clamp(min=1)
    std_G = variance_G.sqrt()
    comparable_N = finite_N & (count_G >= 2)[index_N]
    return _Groups(
        count=count_G[index_N],
        mean=mean_G[index_N],
        std=std_G[index_N],
        usable=comparable_N & (std_G > MIN_STD)[index_N],
        comparable=comparable_N,
    )


def _where(keep_N: Tensor, values_N: Tensor) -> Tensor:
    return torch.where(keep_N, values_N, torch.zeros_like(values_N))


def grpo(rewards_N: Tensor, groups: _Groups) -> Tensor:
    """(r - mean) / (std + eps). DeepSeekMath, arXiv 2402.03300, section 4.1.2."""
    scaled_N = (rewards_N - groups.mean) / (groups.std + STD_EPSILON)
    return _where(groups.usable, scaled_N)


def dr_grpo(rewards_N: Tensor, groups: _Groups) -> Tensor:
    """r - mean, without the division that favours easy and hard groups.

    "Understanding R1-Zero-like training", arXiv 2503.20783, section 3.2.
    """
    return _where(groups.usable, rewards_N - groups.mean)


def rloo(rewards_N: Tensor, groups: _Groups) -> Tensor:
    """r_i minus the mean of the others, which is n/(n-1) (r_i - mean).

    "Back to basics", arXiv 2402.14740, the RLOO estimator.
    """
    factor_N = groups.count / (groups.count - 1).clamp(min=1)
    return _where(groups.usable, factor_N * (rewards_N - groups.mean))


def reinforce_pp_baseline(rewards_N: Tensor, groups: _Groups) -> Tensor:
    """Subtract the group mean, then normalise by the mean and std of the whole step.

    REINFORCE++-baseline, arXiv 2501.03262; the choice of ProRL v2. Groups without
    spread are part of the step's statistics; groups that can't be compared are not.
    """
    centred_N = _where(groups.comparable, rewards_N - groups.mean)
    count = groups.comparable.sum()
    if int(count) < 2:
        return torch.zeros_like(centred_N)
    mean = centred_N.sum() / count
    residual_N = _where(groups.comparable, centred_N - mean)
    std = (residual_N.square().sum() / (count - 1)).sqrt()
    if float(std) <= MIN_STD:
        return torch.zeros_like(centred_N)
    return _where(groups.usable, residual_N / (std + STD_EPSILON))


def maxrl(rewards_N: Tensor, groups: _Groups) -> Tensor:
    """(r - mean) / mean: for binary rewards, the gradient of the log-likelihood of success.

    With K successes of n this weighs a success by (n-K)/K and a failure by -1.
    "Maximum likelihood reinforcement learning", arXiv 2602.02710. A group whose mean is not
    positive has no success to learn from and gets 0.
    """
    positive_N = groups.mean > MIN_STD
    scaled_N = (rewards_N - groups.mean) / groups.mean.clamp(min=MIN_STD)
    return _where(groups.usable & positive_N, scaled_N)


_FORMULAS = {
    Estimator.grpo: grpo,
    Estimator.dr_grpo: dr_grpo,
    Estimator.rloo: rloo,
    Estimator.reinforce_pp_baseline: reinforce_pp_baseline,
    Estimator.maxrl: maxrl,
}
