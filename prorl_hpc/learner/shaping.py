"""Reward shaping, after the groups were filtered on the raw reward. Pure; no tensors.

Shapes: N rollouts. Each term is added to the verifier's reward; a weight of 0 switches it off.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prorl_hpc.learner.algorithm_error import AlgorithmError
from prorl_hpc.recipe import ShapingConfig

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedRewards:
    """Rewards to compute advantages from, and the mean of each term that was on."""

    rewards: Floats
    """[N]"""
    terms: dict[str, float]
    """Mean of each active term over the rollouts, for the metrics."""


def overlong_penalty(
    lengths_N: Floats, *, max_tokens: int, buffer_tokens: int, penalty: float
) -> Floats:
    """0 up to max - buffer, then linearly down to -penalty at max and beyond.

    DAPO, arXiv 2503.14476, equation 13.
    """
    over_N = lengths_N - (max_tokens - buffer_tokens)
    return -penalty * np.clip(over_N / buffer_tokens, 0.0, 1.0)


def stop_properly_penalty(stopped_N: NDArray[np.bool_], *, penalty: float) -> Floats:
    """-penalty for a response that didn't end by itself; ProRL, arXiv 2505.24864, stages 4-5."""
    return np.where(stopped_N, 0.0, -penalty)


def cosine_length_reward(
    lengths_N: Floats, *, max_tokens: int, eta_min: float, eta_max: float
) -> Floats:
    """eta_min + (eta_max - eta_min)/2 (1 + cos(pi t / T)): eta_max at length 0, eta_min at T.

    The scheduled cosine length penalty of ProRL v2; lengths above T count as T.
    """
    angle_N = math.pi * np.clip(lengths_N / max_tokens, 0.0, 1.0)
    return eta_min + 0.5 * (eta_max - eta_min) * (1.0 + np.cos(angle_N))


def cosine_is_on(update: int, *, on_updates: int, off_updates: int) -> bool:
    """Whether the schedule on for N updates, off for M, on for N, ... is on at this update."""
    return update % (on_updates + off_updates) < on_updates


def shape_rewards(
    raw_rewards_N: Sequence[float] | Floats,
    response_tokens_N: Sequence[int] | NDArray[np.integer],
    stopped_N: Sequence[bool] | NDArray[np.bool_],
    *,
    config: ShapingConfig,
    max_tokens: int,
    update: int,
) -> ShapedRewards:
    """Raw rewards plus every term that is on at this update.

    `response_tokens_N` counts the tokens the policy sampled; `stopped_N` is true where the
    response ended by itself; `max_tokens` is the longest response of the current stage.
    """
    rewards_N = np.array(raw_rewards_N, dtype=np.float64)
    lengths_N = np.asarray(response_tokens_N, dtype=np.float64)
    stopped = np.asarray(stopped_N, dtype=np.bool_)
    if not rewards_N.shape == lengths_N.shape == stopped.shape:
        raise AlgorithmError(
            f"rewards {rewards_N.shape}, lengths {lengths_N.shape} and stop flags "
            f"{stopped.shape} differ in length"
        )
    active = _active_terms(lengths_N, stopped, config=config, max_tokens=max_tokens, update=update)
    for term_N in active.values():
        rewards_N = rewards_N + term_N
    return ShapedRewards(
        rewards=rewards_N,
        terms={name: float(term.mean()) if term.size else 0.0 for name, term in active.items()},
    )


def _active_terms(
    lengths_N: Floats,
    stopped_N: NDArray[np.bool_],
    *,
    config: ShapingConfig,
    max_tokens: int,
    update: int,
) -> dict[str, Floats]:
    terms: dict[str, Floats] = {}
    if config.overlong_penalty:
        if not 0 < config.overlong_buffer_tokens <= max_tokens:
            raise AlgorithmError(
                f"algorithm.shaping.overlong_buffer_tokens={config.overlong_buffer_tokens} must "
                f"lie in 1..{max_tokens}, the longest response"
            )
        terms["overlong"] = overlong_penalty(
            lengths_N,
            max_tokens=max_tokens,
            buffer_tokens=config.overlong_buffer_tokens,
            penalty=config.overlong_penalty,
        )
    if config.truncation_penalty:
        terms["stop_properly"] = stop_properly_penalty(stopped_N, penalty=config.truncation_penalty)
    if config.cosine_length_weight and cosine_is_on(
        update, on_updates=config.cosine_on_steps, off_updates=config.cosine_off_steps
    ):
        terms["cosine_length"] = config.cosine_length_weight * cosine_length_reward(
            lengths_N,
            max_tokens=max_tokens,
            eta_min=config.cosine_min,
            eta_max=config.cosine_max,
        )
    return terms
