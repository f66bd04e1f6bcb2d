"""The policy loss of one packed micro-batch. Pure: no model, no optimizer, no ranks.

Shapes: T tokens of a packed micro-batch, flat; `sequence_ids_T` says which sequence a token is of
(any integers; the tokens of a sequence lie in one micro-batch); `mask_T` is true on tokens that
the policy sampled. All of them are aligned to the predicted token: entry t is about token t.

Usage, in the train loop:

    config = objective_config(recipe.algorithm, max_new_tokens=longest_of_run(recipe))

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
`reference_T`: None when the KL coefficient is 0. With `kl_place=reward` the loss has no KL
term: subtract `kl_reward_penalty` from the shaped rewards before the advantages instead.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from prorl_hpc.choices import KlPlace, Surrogate
from prorl_hpc.learner.aggregate import aggregate, local_denominator
from prorl_hpc.learner.algorithm_error import AlgorithmError
from prorl_hpc.learner.correction import correction_weights
from prorl_hpc.learner.kl import importance_weighted_kl, kl_estimate
from prorl_hpc.learner.loss_metrics import add_sums, mean_metrics, surrogate_sums
from prorl_hpc.learner.objective_config import ObjectiveConfig, objective_config
from prorl_hpc.learner.surrogate import SurrogateLoss, cispo, gspo, log_ratio, ppo_clip

__all__ = [
    "ObjectiveConfig",
    "add_sums",
    "loss_denominator",
    "mean_metrics",
    "objective_config",
    "policy_loss",
    "valid_tokens",
]


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
    sums = surrogate_sums(
        log_ratio_M,
        surrogate,
        weight_M,
        old_M=tokens.old,
        sampler_M=tokens.sampler,
        num_sequences=tokens.num_sequences,
    )
    sums["masked_nonfinite"] = float(mask_T.bool().sum()) - sums["tokens"]
    if reference_logprobs_T is not None and config.needs_reference:
        kl_M = _kl(tokens, reference_logprobs_T[tokens.keep], config)
        # Unweighted: one token's weight of millions is no spike for the reset controller.
        sums["kl"] = float(kl_M.detach().sum())
        if config.kl_place is KlPlace.loss:
            loss_M = loss_M + config.kl_coef * _weighted_kl(kl_M, tokens, config)
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
    return kl_estimate(
        tokens.new,
        reference_M.detach().to(tokens.new.dtype),
        estimator=config.kl_estimator,
        input_clamp=config.kl_input_clamp,
        output_clamp=config.kl_output_clamp,
    )


def _weighted_kl(kl_M: Tensor, tokens: _Tokens, config: ObjectiveConfig) -> Tensor:
    if not config.kl_importance_weighted:
        return kl_M
    behaviour_M = tokens.old if tokens.sampler is None else tokens.sampler
    return importance_weighted_kl(kl_M, tokens.new, behaviour_M, estimator=config.kl_estimator)
