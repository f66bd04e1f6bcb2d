"""Dynamic sampling: which groups carry a signal, and what to do when too few do. Pure; no tensors.

Filtering looks at the raw reward of the verifier, before any shaping: a length penalty must not
turn a group of equally right answers into a signal. Shapes: N rollouts.
DAPO, arXiv 2503.14476, section 3.2, made bounded: a step never draws for ever and never aborts
without saying what to change.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from prorl_hpc.choices import OnExhausted
from prorl_hpc.learner.algorithm_error import AlgorithmError

MIN_SPREAD = 1e-6
"""Raw rewards of a group that differ by no more than this are equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterResult:
    """Which rollouts stay ([N]), and counts of groups by verdict."""

    keep: NDArray[np.bool_]
    num_groups: int
    num_kept: int
    num_equal_low: int
    """All rewards equal and at most 0: too hard, or broken."""
    num_equal_high: int
    """All rewards equal and above 0: solved."""
    num_too_few: int
    """Fewer than two finite rewards."""

    @property
    def acceptance(self) -> float:
        """Share of the groups that carry a signal; 0 without groups."""
        return self.num_kept / self.num_groups if self.num_groups else 0.0


def filter_groups(
    raw_rewards_N: Sequence[float] | NDArray[np.floating],
    group_ids_N: Sequence[int] | NDArray[np.integer],
    *,
    min_spread: float = MIN_SPREAD,
) -> FilterResult:
    """Keep the groups whose finite raw rewards differ.

    Rollouts with a non-finite reward in a kept group stay (their advantage is 0).
    """
    rewards_N = np.asarray(raw_rewards_N, dtype=np.float64)
    ids_G, index_N = np.unique(np.asarray(group_ids_N), return_inverse=True)
    if rewards_N.shape != index_N.shape:
        raise AlgorithmError(
            f"rewards {rewards_N.shape} and group ids {index_N.shape} differ in length"
        )
    finite_N = np.isfinite(rewards_N)
    count_G = np.bincount(index_N[finite_N], minlength=ids_G.size)
    low_G = np.full(ids_G.size, np.inf)
    high_G = np.full(ids_G.size, -np.inf)
    np.minimum.at(low_G, index_N[finite_N], rewards_N[finite_N])
    np.maximum.at(high_G, index_N[finite_N], rewards_N[finite_N])
    enough_G = count_G >= 2
    differs_G = enough_G & (high_G - low_G > min_spread)
    equal_G = enough_G & ~differs_G
    return FilterResult(
        keep=differs_G[index_N] if index_N.size else np.zeros(0, dtype=np.bool_),
        num_groups=int(ids_G.size),
        num_kept=int(differs_G.sum()),
        num_equal_low=int((equal_G & (high_G <= 0)).sum()),
        num_equal_high=int((equal_G & (high_G > 0)).sum()),
        num_too_few=int((~enough_G).sum()),
    )


class RefillAction(StrEnum):
    """What the learner does next."""

    train = "train"
    refill = "refill"
    train_partial = "train_partial"
    skip = "skip"
    fail = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class RefillDecision:
    """The next move of a step, with its reason for the log."""

    action: RefillAction
    train_groups: int
    """Groups to train now; 0 unless the action trains."""
    request_groups: int
    """Groups to draw next; 0 unless the action is `refill`."""
    reason: str


def decide_refill(
    *,
    kept_groups: int,
    seen_groups: int,
    wanted_groups: int,
    rounds_used: int,
    max_rounds: int,
    on_exhausted: OnExhausted = OnExhausted.accept_partial,
    multiple_of: int = 1,
) -> RefillDecision:
    """Train, draw more, train what there is, or fail with what to change.

    `rounds_used` counts draws so far (the first batch is 1). A refill asks for what is missing
    over the acceptance seen, at most one whole batch. A partial batch is cut to `multiple_of`
    (updates per step x ranks, say). With no usable group at all the step is skipped, or fails.
    """
    if kept_groups >= wanted_groups:
        return RefillDecision(
            action=RefillAction.train,
            train_groups=wanted_groups,
            request_groups=0,
            reason=f"{kept_groups} of {seen_groups} groups carry a signal",
        )
    missing = wanted_groups - kept_groups
    if rounds_used < max_rounds:
        acceptance = max(kept_groups, 1) / max(seen_groups, 1)
        request = min(wanted_groups, math.ceil(missing / acceptance))
        return RefillDecision(
            action=RefillAction.refill,
            train_groups=0,
            request_groups=request,
            reason=f"{missing} of {wanted_groups} groups missing; drawing {request} more",
        )
    return _exhausted(
        kept_groups=kept_groups,
        seen_groups=seen_groups,
        wanted_groups=wanted_groups,
        max_rounds=max_rounds,
        on_exhausted=on_exhausted,
        multiple_of=multiple_of,
    )


def _exhausted(
    *,
    kept_groups: int,
    seen_groups: int,
    wanted_groups: int,
    max_rounds: int,
    on_exhausted: OnExhausted,
    multiple_of: int,
) -> RefillDecision:
    found = (
        f"{kept_groups} of {seen_groups} groups carry a signal after {max_rounds} draws, "
        f"{wanted_groups} wanted"
    )
    usable = kept_groups - kept_groups % multiple_of
    if on_exhausted is OnExhausted.error:
        return RefillDecision(
            action=RefillAction.fail,
            train_groups=0,
            request_groups=0,
            reason=f"{found}; raise algorithm.max_refills, lower algorithm.batch_groups, "
            "or choose instances the policy sometimes solves",
        )
    return RefillDecision(
        action=RefillAction.train_partial if usable else RefillAction.skip,
        train_groups=usable,
        request_groups=0,
        reason=f"{found}; training {usable}" if usable else f"{found}; step skipped",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EffectiveSamples:
    """Running counts of what sampling cost and what was trained; part of the checkpoint."""

    seen_groups: int = 0
    kept_groups: int = 0
    trained_groups: int = 0
    trained_rollouts: int = 0
    stale_groups: int = 0

    def add(
        self,
        *,
        filtered: FilterResult | None = None,
        trained_groups: int = 0,
        trained_rollouts: int = 0,
        stale_groups: int = 0,
    ) -> "EffectiveSamples":
        """The counts after one draw or one step."""
        return EffectiveSamples(
            seen_groups=self.seen_groups + (filtered.num_groups if filtered else 0),
            kept_groups=self.kept_groups + (filtered.num_kept if filtered else 0),
            trained_groups=self.trained_groups + trained_groups,
            trained_rollouts=self.trained_rollouts + trained_rollouts,
            stale_groups=self.stale_groups + stale_groups,
        )

    @property
    def efficiency(self) -> float:
        """Trained groups over groups sampled (stale ones included)."""
        sampled = self.seen_groups + self.stale_groups
        return self.trained_groups / sampled if sampled else 0.0
