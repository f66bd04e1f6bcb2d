"""What the policy loss depends on besides tensors, checked once. Knows the recipe, no tensors."""

import math
from dataclasses import dataclass

from prorl_hpc.choices import Aggregation, Correction, KlEstimator, KlPlace, Surrogate
from prorl_hpc.learner.algorithm_error import AlgorithmError
from prorl_hpc.recipe import AlgorithmConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """Everything the policy loss depends on besides tensors."""

    clip_low: float
    """Lower ratio bound: 1 minus this."""
    clip_high: float
    """Upper ratio bound: 1 plus this (clip-higher when larger than `clip_low`)."""
    kl_coef: float
    """Weight of KL(pi_theta || pi_ref); 0 needs no reference."""
    surrogate: Surrogate = Surrogate.ppo
    dual_clip: float | None = None
    """Bound c > 1 on the ratio of negative advantages (PPO only); None for no bound."""
    aggregation: Aggregation = Aggregation.token_mean
    constant_tokens: int | None = None
    """Divisor of each sequence with `aggregation=constant` (Dr.GRPO)."""
    kl_estimator: KlEstimator = KlEstimator.k3
    kl_place: KlPlace = KlPlace.loss
    kl_input_clamp: float | None = 20.0
    kl_output_clamp: float | None = 10.0
    kl_importance_weighted: bool = False
    """Weigh the KL by pi_theta / pi_behaviour, for off-policy data."""
    correction: Correction = Correction.none
    correction_low: float = 0.5
    """Lower bound of the kept weights (IcePop) or geometric means (sequence mask)."""
    correction_high: float = 2.0
    """Upper bound, or the cap of truncated importance sampling."""
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        """Coerce names to enums and refuse numbers that have no meaning."""
        for field, kind in _ENUM_FIELDS.items():
            object.__setattr__(self, field, _enum(kind, field, getattr(self, field)))
        for field in ("clip_low", "clip_high", "kl_coef", "entropy_coef"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise AlgorithmError(f"algorithm.{field}={value} must be a finite number >= 0")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise AlgorithmError(
                f"algorithm.dual_clip={self.dual_clip} must be above 1; null switches it off"
            )
        if not 0 <= self.correction_low <= self.correction_high:
            raise AlgorithmError(
                f"algorithm.correction_low={self.correction_low} must lie between 0 and "
                f"correction_high={self.correction_high}"
            )
        if self.aggregation is Aggregation.constant and (self.constant_tokens or 0) < 1:
            raise AlgorithmError(
                f"algorithm.constant_tokens={self.constant_tokens} with aggregation=constant; "
                "set it to the longest response in tokens"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probabilities are used at all."""
        return self.kl_coef > 0

    @property
    def needs_sampler(self) -> bool:
        """Whether the sampler's log-probabilities are required."""
        return self.correction is not Correction.none


_ENUM_FIELDS = {
    "surrogate": Surrogate,
    "aggregation": Aggregation,
    "kl_estimator": KlEstimator,
    "kl_place": KlPlace,
    "correction": Correction,
}


def _enum(kind: type, field: str, value: object) -> object:
    try:
        return kind(value)
    except ValueError as err:
        names = ", ".join(item.value for item in kind)  # type: ignore[attr-defined]
        raise AlgorithmError(
            f"algorithm.{field}={value!r} is unknown; choose one of {names}"
        ) from err


def objective_config(algorithm: AlgorithmConfig, *, max_new_tokens: int) -> ObjectiveConfig:
    """The objective of a recipe; Dr.GRPO's constant is the longest response it allows."""
    return ObjectiveConfig(
        surrogate=algorithm.surrogate,
        aggregation=algorithm.aggregation,
        constant_tokens=max_new_tokens,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        kl_coef=algorithm.kl_coef,
        kl_estimator=algorithm.kl_estimator,
        kl_place=algorithm.kl_place,
        kl_input_clamp=algorithm.kl_input_clamp,
        kl_output_clamp=algorithm.kl_output_clamp,
        kl_importance_weighted=algorithm.kl_importance_weighted,
        correction=algorithm.correction,
        correction_low=algorithm.correction_low,
        correction_high=algorithm.correction_high,
        entropy_coef=algorithm.entropy_coef,
    )
