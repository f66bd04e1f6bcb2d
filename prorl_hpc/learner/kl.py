"""Estimators of KL(pi_theta || pi_ref) from sampled tokens. Pure; coefficients are the caller's.

Shapes: M tokens that count, S sequences. d = log pi_theta - log pi_ref. k1 = d, k2 = d^2/2,
k3 = e^-d - 1 + d (Schulman, "Approximating KL divergence", 2020). As a loss on on-policy samples
only k2 has the unbiased gradient; off-policy, and for k1 and k3, use `importance_weighted_kl`.
"""

import torch
from torch import Tensor

from prorl_hpc.choices import KlEstimator
from prorl_hpc.learner.surrogate import log_ratio


def kl_estimate(
    logprobs_M: Tensor,
    reference_logprobs_M: Tensor,
    *,
    estimator: KlEstimator,
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
) -> Tensor:
    """Per-token estimate. Clamped at the input (d) and the output; beyond either, no gradient.

    Without the input clamp k3 overflows at a large gap and its gradient is NaN. The numbers
    20 and 10 are those of NeMo RL's ProRL v2 recipe; ProRL v2 itself clamps d to +-10.
    """
    d_M = logprobs_M - reference_logprobs_M
    if input_clamp is not None:
        d_M = d_M.clamp(-input_clamp, input_clamp)
    if estimator is KlEstimator.k1:
        kl_M = d_M
    elif estimator is KlEstimator.k2:
        kl_M = d_M.square() / 2
    else:
        kl_M = torch.expm1(-d_M) + d_M
    if output_clamp is not None:
        kl_M = kl_M.clamp(-output_clamp, output_clamp)
    return kl_M


def importance_weighted_kl(
    kl_M: Tensor, logprobs_M: Tensor, behaviour_logprobs_M: Tensor, *, estimator: KlEstimator
) -> Tensor:
    """w k with w = pi_theta / pi_behaviour: unbiased in value and gradient off-policy.

    k1 and k3 need the gradient of w (DeepSeek-V3.2, arXiv 2512.02556, section 3.1); k2's own
    gradient is already the one of the divergence, so its w is a constant.
    """
    weight_M = log_ratio(logprobs_M, behaviour_logprobs_M).exp()
    if estimator is KlEstimator.k2:
        weight_M = weight_M.detach()
    return weight_M * kl_M


def kl_reward_penalty(
    logprobs_T: Tensor,
    reference_logprobs_T: Tensor,
    mask_T: Tensor,
    sequence_index_T: Tensor,
    *,
    num_sequences: int,
    coefficient: float,
    estimator: KlEstimator,
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
) -> Tensor:
    """What to subtract from each sequence's reward, shape [S]: coefficient x sum of its KL.

    PPO-RLHF's form (arXiv 2203.02155, equation 2). Constant in theta. `sequence_index_T` lies in
    0..S-1; masked tokens and tokens with a non-finite log-probability don't count.
    """
    keep_T = mask_T.bool() & torch.isfinite(logprobs_T) & torch.isfinite(reference_logprobs_T)
    kl_M = kl_estimate(
        logprobs_T.detach()[keep_T],
        reference_logprobs_T.detach()[keep_T],
        estimator=estimator,
        input_clamp=input_clamp,
        output_clamp=output_clamp,
    )
    zeros_S = kl_M.new_zeros(num_sequences)
    return coefficient * zeros_S.index_add(0, sequence_index_T[keep_T], kl_M)
