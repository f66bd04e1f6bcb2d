"""One optimizer step from samples to new weights. Knows model and objective; no files, no buffer.

Shapes: N samples of the step (the same list on every rank), M sampled tokens of a micro-batch.

    samples --split--> updates --pack over ranks--> micro-batches
       old and reference scores (only when used) -> advantages -> per update:
       forward, loss / global denominator, backward, clip, AdamW

Every rank runs the same number of forward and backward passes, dummies included.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prorl_hpc.choices import KlPlace, ReferencePlacement
from prorl_hpc.learner.advantage import compute_advantages
from prorl_hpc.learner.algorithm_error import AlgorithmError
from prorl_hpc.learner.batches import (
    MicroBatch,
    Sample,
    build_micro_batch,
    plan_micro_batches,
    split_updates,
)
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.kl import kl_reward_penalty
from prorl_hpc.learner.model import PolicyModel
from prorl_hpc.learner.objective import (
    ObjectiveConfig,
    add_sums,
    loss_denominator,
    mean_metrics,
    policy_loss,
)
from prorl_hpc.learner.optimizer import clip_gradients, set_learning_rate
from prorl_hpc.learner.reference import Reference
from prorl_hpc.recipe import AlgorithmConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step did."""

    metrics: dict[str, float]
    kl: float | None
    """Mean KL(policy || reference) per token at the first update; None without a reference."""
    num_skipped: int
    """Updates left out because a gradient wasn't finite."""


@dataclass(kw_only=True, slots=True)
class Stepper:
    """Model, optimizer and reference, and how they are stepped."""

    model: PolicyModel
    optimizer: torch.optim.Optimizer
    algorithm: AlgorithmConfig
    objective: ObjectiveConfig
    ranks: Ranks
    tokens_per_micro_batch: int
    reference: Reference | None = None
    reference_placement: ReferencePlacement = ReferencePlacement.device
    hidden_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.hidden_size = int(self.model.network.config.hidden_size)  # type: ignore[union-attr, arg-type]

    def renew_reference(self, *, index: int, step: int) -> None:
        """The reference becomes the policy as it is now, where the objective needs one."""
        if self.objective.needs_reference:
            # The old one goes first: two would be the peak of the run.
            self.reference = None
            self.reference = Reference.of(
                self.model,
                index=index,
                step=step,
                ranks=self.ranks,
                placement=self.reference_placement,
            )

    def run(
        self, samples: Sequence[Sample], shaped_rewards: Sequence[float], *, step: int
    ) -> StepResult:
        """Trains on the samples. `step` counts from 0. Raises AlgorithmError for bad settings."""
        started = time.monotonic()
        updates = self._build(samples)
        every = [batch for update in updates for batch in update]
        self._score(every, needs_old=len(updates) > 1 or self._kl_in_reward)
        scored = time.monotonic()
        advantages_N = self._advantages(samples, shaped_rewards, every)
        rate = set_learning_rate(self.optimizer, config=self.algorithm, step=step)
        done = [self._update(update, advantages_N) for update in updates]
        totals: dict[str, float] = {}
        for sums, _ in done:
            totals = add_sums(totals, sums)
        norms = [norm for _, norm in done]
        finite = [norm for norm in norms if math.isfinite(norm)]
        metrics = mean_metrics(totals)
        kl = mean_metrics(done[0][0]).get("kl") if done else None
        if kl is not None:
            # Of the policy that made the batch: exactly 0 on the first one after a reset.
            metrics |= {"kl": kl, "kl_mean": metrics["kl"]}
        metrics["loss"] = metrics.get("loss", 0.0) / max(len(updates), 1)
        metrics |= {
            "gradient_norm": sum(finite) / len(finite) if finite else math.nan,
            "learning_rate": rate,
            "updates": float(len(updates)),
            "micro_batches": float(len(every)),
            "samples": float(len(samples)),
            "batch_tokens": float(sum(sample.length for sample in samples)),
            "score_seconds": scored - started,
            "train_seconds": time.monotonic() - scored,
        }
        return StepResult(
            metrics=metrics,
            kl=kl,
            num_skipped=len(norms) - len(finite),
        )

    @property
    def _kl_in_reward(self) -> bool:
        return self.objective.needs_reference and self.objective.kl_place is KlPlace.reward

    def _build(self, samples: Sequence[Sample]) -> list[list[MicroBatch]]:
        """This rank's micro-batches of every update."""
        updates = []
        for chosen in split_updates(samples, self.algorithm.updates_per_step):
            plan = plan_micro_batches(
                samples,
                chosen,
                token_budget=self.tokens_per_micro_batch,
                num_ranks=self.ranks.world,
                hidden_size=self.hidden_size,
            )
            mine = plan.micro_batches[self.ranks.rank]
            updates.append(
                [build_micro_batch(samples, batch, device=self.ranks.device) for batch in mine]
            )
        return updates

    @torch.no_grad()
    def _score(self, batches: Sequence[MicroBatch], *, needs_old: bool) -> None:
        if needs_old:
            for batch in batches:
                batch.old_M = self._forward(batch)[0]
        if self.objective.needs_reference:
            if self.reference is None:
                raise AlgorithmError(
                    f"algorithm.kl_coef={self.objective.kl_coef} needs a reference; there is none"
                )
            with self.reference.in_place(self.model):
                for batch in batches:
                    batch.reference_M = self._forward(batch)[0]

    def _forward(
        self, batch: MicroBatch, *, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        logprobs_M, entropy_M = self.model(
            batch.tokens_T,
            batch.layout,
            batch.predictors_M,
            batch.targets_M,
            batch.temperatures_M,
            with_entropy,
        )
        return logprobs_M, entropy_M

    def _advantages(
        self,
        samples: Sequence[Sample],
        shaped_rewards: Sequence[float],
        batches: Sequence[MicroBatch],
    ) -> Tensor:
        rewards_N = torch.tensor(list(shaped_rewards), dtype=torch.float64)
        if self._kl_in_reward:
            rewards_N = rewards_N - self._kl_penalties(len(samples), batches)
        groups_N = torch.tensor([sample.group_id for sample in samples])
        advantages_N = compute_advantages(rewards_N, groups_N, estimator=self.algorithm.estimator)
        return advantages_N.to(self.ranks.device, torch.float32)

    def _kl_penalties(self, num_samples: int, batches: Sequence[MicroBatch]) -> Tensor:
        local_N = torch.zeros(num_samples, dtype=torch.float64)
        for batch in batches:
            if batch.old_M is None or batch.reference_M is None:
                continue
            local_N += kl_reward_penalty(
                batch.old_M,
                batch.reference_M,
                batch.mask_M,
                batch.samples_M,
                num_sequences=num_samples,
                coefficient=self.objective.kl_coef,
                estimator=self.objective.kl_estimator,
                input_clamp=self.objective.kl_input_clamp,
                output_clamp=self.objective.kl_output_clamp,
            ).to("cpu", torch.float64)
        return torch.stack(self.ranks.gather(local_N)).sum(0)

    def _update(
        self, batches: Sequence[MicroBatch], advantages_N: Tensor
    ) -> tuple[dict[str, float], float]:
        """One optimizer update; sums for the metrics over all ranks, and the gradient norm."""
        shares = [
            loss_denominator(b.mask_M, b.samples_M, self._sampler(b), config=self.objective)
            for b in batches
        ]
        denominator = self.ranks.sum({"denominator": sum(shares)})["denominator"]
        self.optimizer.zero_grad(set_to_none=True)
        totals: dict[str, float] = {}
        for batch in batches:
            logprobs_M, entropy_M = self._forward(batch, with_entropy=True)
            loss, sums = policy_loss(
                logprobs_M,
                batch.old_M,
                self._sampler(batch),
                batch.reference_M,
                advantages_N[batch.samples_M],
                batch.mask_M,
                batch.samples_M,
                config=self.objective,
                denominator=denominator,
                entropy_T=entropy_M,
            )
            # FSDP averages gradients over the ranks; the denominator is the whole step's.
            (loss * self.ranks.world).backward()  # type: ignore[no-untyped-call]
            totals = add_sums(totals, sums)
        parameters = [parameter for _, parameter in self.model.named_weights()]
        norm = clip_gradients(parameters, limit=self.algorithm.gradient_clip)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.ranks.sum(totals), norm

    def _sampler(self, batch: MicroBatch) -> Tensor:
        """The sampler's log-probabilities: tokens without a finite one don't count."""
        return batch.sampler_M
