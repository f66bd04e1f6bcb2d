"""Weights for tokens that another policy sampled, and what to do with stale groups. Pure.

Shapes: M tokens that count, S sequences, N rollouts. delta_M = log pi_old - log pi_sampler: the
learner's own log-probabilities at the start of the step against the ones the engine reported for
the tokens it sampled (another kernel, another precision, an older version; per token, so mixed
versions in one trajectory need nothing more). Weights are detached. A product of ratios over a
sequence explodes with its length and is not offered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prorl_hpc.choices import Correction, StalePolicy
from prorl_hpc.learner.algorithm_error import AlgorithmError
from prorl_hpc.learner.surrogate import log_ratio, sequence_mean


def truncated_weights(delta_M: Tensor, *, high: float) -> Tensor:
    """min(w, high): truncated importance sampling (Ionides 2008), with a constant cap."""
    return delta_M.exp().clamp(max=high)


def icepop_weights(delta_M: Tensor, *, low: float, high: float) -> Tensor:
    """w inside [low, high], else 0: IcePop, Ring-1T, arXiv 2510.18855; ProRL v2 uses [0.5, 5]."""
    weight_M = delta_M.exp()
    inside_M = (weight_M >= low) & (weight_M <= high)
    return torch.where(inside_M, weight_M, torch.zeros_like(weight_M))


def sequence_mask_weights(
    delta_M: Tensor, sequence_index_M: Tensor, *, num_sequences: int, low: float, high: float
) -> Tensor:
    """w on sequences whose geometric-mean ratio exp(mean delta) is in [low, high], else 0."""
    mean_S = sequence_mean(delta_M, sequence_index_M, num_sequences=num_sequences).exp()
    inside_S = (mean_S >= low) & (mean_S <= high)
    weight_M = delta_M.exp()
    return torch.where(inside_S[sequence_index_M], weight_M, torch.zeros_like(weight_M))


def decoupled_weights(delta_M: Tensor) -> Tensor:
    """w = pi_prox / pi_behaviour before the clipped pi_theta / pi_prox.

    Decoupled PPO, arXiv 2110.00641 (also AReaL, arXiv 2505.24298).
    """
    return delta_M.exp()


def correction_weights(
    old_M: Tensor,
    sampler_M: Tensor,
    sequence_index_M: Tensor,
    *,
    correction: Correction,
    num_sequences: int,
    low: float,
    high: float,
) -> Tensor:
    """Detached weight of each token, in the dtype of `old_M`; ones for `Correction.none`."""
    if correction is Correction.none:
        return torch.ones_like(old_M)
    delta_M = log_ratio(old_M.detach(), sampler_M.detach().to(old_M.dtype))
    if correction is Correction.truncated:
        return truncated_weights(delta_M, high=high)
    if correction is Correction.icepop:
        return icepop_weights(delta_M, low=low, high=high)
    if correction is Correction.sequence_mask:
        return sequence_mask_weights(
            delta_M, sequence_index_M, num_sequences=num_sequences, low=low, high=high
        )
    return decoupled_weights(delta_M)


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessDecision:
    """Which rollouts are trained ([N]), and the counts for the metrics."""

    keep: NDArray[np.bool_]
    num_stale_groups: int
    max_staleness: int
    """Largest staleness seen, in versions; 0 without rollouts."""


def decide_staleness(
    oldest_version_N: Sequence[int | None],
    group_ids_N: Sequence[int],
    *,
    learner_version: int,
    max_staleness: int,
    policy: StalePolicy,
) -> StalenessDecision:
    """Judge whole groups by their oldest rollout, so that no group is trained in part.

    `oldest_version_N` is the oldest version that sampled any token of the rollout; None, for a
    rollout without a sampled token, is never stale. With `drop`
    a stale group leaves the batch; with `correct` it stays (the token weights correct it) and is
    only counted. Raises `AlgorithmError` for a version newer than the learner's.
    """
    versions_N = np.asarray(
        [learner_version if version is None else version for version in oldest_version_N],
        dtype=np.int64,
    )
    _, index_N = np.unique(np.asarray(group_ids_N), return_inverse=True)
    if versions_N.shape != index_N.shape:
        raise AlgorithmError(
            f"oldest versions {versions_N.shape} and group ids {index_N.shape} differ in length"
        )
    if not versions_N.size:
        return StalenessDecision(
            keep=np.zeros(0, dtype=np.bool_), num_stale_groups=0, max_staleness=0
        )
    staleness_N = learner_version - versions_N
    if staleness_N.min() < 0:
        raise AlgorithmError(
            f"a rollout carries policy version {versions_N.max()}, newer than the learner's "
            f"{learner_version}; the run directory mixes two histories"
        )
    worst_G = np.zeros(int(index_N.max()) + 1, dtype=np.int64)
    np.maximum.at(worst_G, index_N, staleness_N)
    stale_G = worst_G > max_staleness
    if policy is StalePolicy.drop:
        keep_N = ~stale_G[index_N]
    else:
        keep_N = np.ones(versions_N.shape, dtype=np.bool_)
    return StalenessDecision(
        keep=keep_N,
        num_stale_groups=int(stale_G.sum()),
        max_staleness=int(staleness_N.max()),
    )
