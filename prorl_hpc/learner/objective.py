"""The policy loss of one packed micro-batch. Pure: no model, no optimizer, no ranks.

Shapes: T tokens of a packed micro-batch, flat; `sequence_ids_T` says which sequence a token is of
(any integers; the tokens of a sequence lie in one micro-batch); `mask_T` is true on tokens that
the policy sampled. All of them are aligned to the predicted token: entry t is about token t.

Usage, in the train loop:

    config = ObjectiveConfig(clip_low=0.2, clip_high=0.4, kl_coef=1e-4, ...)   # from the recipe

    # 1. Once per batch of groups, over all ranks: filter, shape, advantages.
    kept = filter_groups(raw_rewards_N, group_ids_N)
    shaped = shape_rewards(raw_rewards_N, ..., config=shaping, update=step)
    advantages_N = compute_advantages(shaped.rewards_N, group_ids_N, estimator="grpo")

    # 2. The step's denominator: a sum over all its micro-batches, then over the ranks.
    local = sum(
        loss_denominator(m.mask_T, m.sequence_ids_T, m.sampler_T, config=config) for m in micro
    )
    denominator = all_reduce_sum(local)

    # 3. Per micro-batch. FSDP averages gradients over ranks, so give back the world size.
    for m in micro:                                    # equal counts on all ranks; some are empty
        logprobs_T, entropy_T = token_logprobs(hidden, head, m.targets_T, temperature=...)
        loss, sums = policy_loss(
            logprobs_T, m.old_T, m.sampler_T, m.reference_T,
            m.advantages_T, m.mask_T, m.sequence_ids_T,
            config=config, denominator=denominator, entropy_T=entropy_T,
        )
        (loss * world_size).backward()                 # an empty micro-batch gives 0, connected
        totals = add_sums(totals, sums)                # plain sums: all-reduce them as they are
    metrics = mean_metrics(totals)

`old_T`: the learner's own log-probabilities at the start of the batch; None means "this pass", for
a single update per batch. `sampler_T`: what the engine reported; None means no correction.
`reference_T`: None when the KL coefficient is 0. With `kl_placement=reward` the loss has no KL
term: subtract `kl_reward_penalty` from the shaped rewards before the advantages instead.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from prorl_hpc.learner.aggregate import Aggregation, aggregate, local_denominator
from prorl_hpc.learner.algorithm_error import AlgorithmError
from prorl_hpc.learner.correction import Correction, correction_weights
from prorl_hpc.learner.kl import (
    KlEstimator,
    KlPlacement,
    importance_weighted_kl,
    kl_estimate,
)
from prorl_hpc.learner.surrogate import (
    Surrogate,
    SurrogateLoss,
    cispo,
    gspo,
    log_ratio,
    ppo_clip,
)


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
    kl_placement: KlPlacement = KlPlacement.loss
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
    "kl_placement": KlPlacement,
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


def valid_tokens(mask_T: Tensor, sampler_logprobs_T: Tensor | None = None) -> Tensor:
    """Tokens that count: sampled by the policy, with a finite sampler log-probability."""
    valid_T = mask_T.bool()
    if sampler_logprobs_T is not None:
        valid_T = valid_T & torch.isfinite(sampler_logprobs_T)
    return valid_T


def loss_denominator(
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    sampler_logprobs_T: Tensor | None = None,
    *,
    config: ObjectiveConfig,
) -> float:
    """One micro-batch's share of the step's denominator; sum over micro-batches and ranks.

    Pass the same mask and sampler log-probabilities as to `policy_loss`.
    """
    return local_denominator(
        valid_tokens(mask_T, sampler_logprobs_T),
        sequence_ids_T,
        aggregation=config.aggregation,
        constant_tokens=config.constant_tokens,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tokens:
    """The M tokens that count, and nothing else; S sequences, renumbered from 0."""

    new: Tensor
    old: Tensor
    sampler: Tensor | None
    advantages: Tensor
    index: Tensor
    num_sequences: int
    keep: Tensor
    """Positions in the packed micro-batch."""


def policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor | None,
    sampler_logprobs_T: Tensor | None,
    reference_logprobs_T: Tensor | None,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    *,
    config: ObjectiveConfig,
    denominator: float,
    entropy_T: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """This micro-batch's share of the step's loss, and sums for the metrics.

    The loss is weight x surrogate + kl_coef x KL - entropy_coef x entropy, aggregated over
    `denominator`. Masked positions are removed first, so whatever they hold (NaN too) can reach
    neither value nor gradient. The sums are over valid tokens; see `mean_metrics`.
    Raises `AlgorithmError` when the configuration needs a tensor that is None.
    """
    _check_inputs(config, sampler_logprobs_T, reference_logprobs_T, entropy_T)
    tokens = _select(
        logprobs_T, old_logprobs_T, sampler_logprobs_T, advantages_T, mask_T, sequence_ids_T
    )
    log_ratio_M = log_ratio(tokens.new, tokens.old)
    surrogate = _surrogate(log_ratio_M, tokens, config)
    weight_M = _weights(tokens, config)
    loss_M = weight_M * surrogate.loss
    sums = _surrogate_sums(log_ratio_M, surrogate, weight_M, tokens)
    sums["masked_nonfinite"] = float(mask_T.bool().sum()) - sums["tokens"]
    if reference_logprobs_T is not None and config.needs_reference:
        kl_M = _kl(tokens, reference_logprobs_T[tokens.keep], config)
        sums["kl"] = float(kl_M.detach().sum())
        if config.kl_placement is KlPlacement.loss:
            loss_M = loss_M + config.kl_coef * kl_M
    if entropy_T is not None:
        entropy_M = entropy_T[tokens.keep]
        sums["entropy"] = float(entropy_M.detach().sum())
        if config.entropy_coef > 0:
            loss_M = loss_M - config.entropy_coef * entropy_M
    loss = aggregate(
        loss_M,
        tokens.index,
        aggregation=config.aggregation,
        denominator=denominator,
        num_sequences=tokens.num_sequences,
    )
    sums["loss"] = float(loss.detach())
    return loss, sums


def _check_inputs(
    config: ObjectiveConfig,
    sampler_T: Tensor | None,
    reference_T: Tensor | None,
    entropy_T: Tensor | None,
) -> None:
    if config.needs_sampler and sampler_T is None:
        raise AlgorithmError(
            f"algorithm.correction={config.correction.value} needs the sampler's "
            "log-probabilities; use an engine that reports them, or correction=none"
        )
    if config.needs_reference and reference_T is None:
        raise AlgorithmError(
            f"algorithm.kl_coef={config.kl_coef} needs reference log-probabilities; "
            "set it to 0 to train without a reference"
        )
    if config.entropy_coef > 0 and entropy_T is None:
        raise AlgorithmError(
            f"algorithm.entropy_coef={config.entropy_coef} needs the entropy of each token; "
            "compute it with token_logprobs(..., with_entropy=True)"
        )


def _select(
    logprobs_T: Tensor,
    old_T: Tensor | None,
    sampler_T: Tensor | None,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
) -> _Tokens:
    keep_M = valid_tokens(mask_T, sampler_T).nonzero().squeeze(-1)
    new_M = logprobs_T[keep_M]
    ids_S, index_M = torch.unique(sequence_ids_T[keep_M], return_inverse=True)
    return _Tokens(
        new=new_M,
        old=new_M.detach() if old_T is None else old_T.detach()[keep_M].to(new_M.dtype),
        sampler=None if sampler_T is None else sampler_T.detach()[keep_M].to(new_M.dtype),
        advantages=advantages_T.detach()[keep_M].to(new_M.dtype),
        index=index_M,
        num_sequences=ids_S.numel(),
        keep=keep_M,
    )


def _surrogate(log_ratio_M: Tensor, tokens: _Tokens, config: ObjectiveConfig) -> SurrogateLoss:
    low, high = config.clip_low, config.clip_high
    if config.surrogate is Surrogate.gspo:
        return gspo(
            log_ratio_M,
            tokens.advantages,
            tokens.index,
            num_sequences=tokens.num_sequences,
            clip_low=low,
            clip_high=high,
        )
    if config.surrogate is Surrogate.cispo:
        return cispo(log_ratio_M, tokens.new, tokens.advantages, clip_low=low, clip_high=high)
    return ppo_clip(
        log_ratio_M,
        tokens.advantages,
        clip_low=low,
        clip_high=high,
        dual_clip=config.dual_clip,
    )


def _weights(tokens: _Tokens, config: ObjectiveConfig) -> Tensor:
    if tokens.sampler is None:
        return torch.ones_like(tokens.old)
    return correction_weights(
        tokens.old,
        tokens.sampler,
        tokens.index,
        correction=config.correction,
        num_sequences=tokens.num_sequences,
        low=config.correction_low,
        high=config.correction_high,
    )


def _kl(tokens: _Tokens, reference_M: Tensor, config: ObjectiveConfig) -> Tensor:
    kl_M = kl_estimate(
        tokens.new,
        reference_M.detach().to(tokens.new.dtype),
        estimator=config.kl_estimator,
        input_clamp=config.kl_input_clamp,
        output_clamp=config.kl_output_clamp,
    )
    if not config.kl_importance_weighted:
        return kl_M
    behaviour_M = tokens.old if tokens.sampler is None else tokens.sampler
    return importance_weighted_kl(kl_M, tokens.new, behaviour_M, estimator=config.kl_estimator)


def _surrogate_sums(
    log_ratio_M: Tensor, surrogate: SurrogateLoss, weight_M: Tensor, tokens: _Tokens
) -> dict[str, float]:
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
    if tokens.sampler is not None:
        named["sampler_gap"] = (tokens.old - tokens.sampler).abs().sum()
    # One transfer from the device instead of one per metric.
    values = torch.stack([value.to(torch.float64) for value in named.values()]).tolist()
    sums = dict(zip(named, values, strict=True))
    sums["tokens"] = float(tokens.keep.numel())
    sums["sequences"] = float(tokens.num_sequences)
    return sums


_NOT_PER_TOKEN = frozenset({"tokens", "sequences", "loss", "masked_nonfinite"})


def add_sums(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    """Metrics of two micro-batches (or ranks) as those of both."""
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in {**left, **right}}


def mean_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Per-token means of summed metrics; counts and the loss, already a share, stay sums."""
    tokens = max(sums.get("tokens", 0.0), 1.0)
    return {
        name: value if name in _NOT_PER_TOKEN else value / tokens for name, value in sums.items()
    }
