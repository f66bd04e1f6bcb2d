"""Groups of trajectories to packed tensors. Knows records and packing; no model, no loss.

Shapes: T packed tokens, M of them predicted (sampled by the policy), N samples of a step.

Entry m of a `MicroBatch` is about one sampled token: the model reads `tokens_T`, and the hidden
state at `predictors_M` predicts `targets_M`. What follows a trajectory's last sampled token
predicts nothing and is left out.
"""

# ruff: noqa: N815 - names of tensors end in their shape
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prorl_hpc.learner.attention import DocumentLayout, document_layout
from prorl_hpc.learner.packing import PackPlan, pack
from prorl_hpc.records import Group, Outcome, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One trajectory as the learner trains on it."""

    group_id: int
    task: str
    tokens: NDArray[np.int32]
    """[T] up to the last sampled token."""
    sampled: NDArray[np.int64]
    """Positions (above 0) of the sampled tokens."""
    sampler_logprobs: NDArray[np.float32]
    """One per sampled token."""
    reward: float
    """The verifier's, unshaped."""
    stopped: bool
    """Whether the response ended by itself."""
    oldest_version: int | None
    temperature: float

    @property
    def length(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def response_tokens(self) -> int:
        return int(self.sampled.shape[0])


def samples_of(groups: Sequence[Group], *, temperatures: Mapping[str, float]) -> list[Sample]:
    """The usable trajectories of the groups, in order; `temperatures` by task."""
    return [
        _sample(trajectory, temperature=temperatures[trajectory.task])
        for group in groups
        for trajectory in group.trajectories
        if trajectory.outcome.usable and trajectory.reward is not None
    ]


def _sample(trajectory: Trajectory, *, temperature: float) -> Sample:
    sampled = np.flatnonzero(trajectory.loss_mask)
    # The very first token has nothing before it that could predict it.
    sampled = sampled[sampled > 0]
    end = int(sampled[-1]) + 1 if sampled.size else min(1, trajectory.tokens.shape[0])
    return Sample(
        group_id=trajectory.group_id,
        task=trajectory.task,
        tokens=trajectory.tokens[:end],
        sampled=sampled,
        sampler_logprobs=trajectory.logprobs[sampled],
        reward=float(trajectory.reward if trajectory.reward is not None else np.nan),
        stopped=trajectory.outcome is not Outcome.truncated
        and trajectory.finish_reason not in ("length", "turns", "time"),
        oldest_version=trajectory.oldest_version,
        temperature=temperature,
    )


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """One forward pass of one rank; scores are filled in as they are computed."""

    tokens_T: Tensor
    layout: DocumentLayout
    predictors_M: Tensor
    targets_M: Tensor
    temperatures_M: Tensor
    sampler_M: Tensor
    samples_M: Tensor
    """Index of each token's sample in the step's list."""
    old_M: Tensor | None = None
    reference_M: Tensor | None = None

    @property
    def mask_M(self) -> Tensor:
        """All true: only sampled tokens are here."""
        return torch.ones_like(self.samples_M, dtype=torch.bool)


def plan_micro_batches(
    samples: Sequence[Sample], chosen: Sequence[int], *, token_budget: int, num_ranks: int,
    hidden_size: int,
) -> PackPlan:  # fmt: skip
    """Micro-batches over the chosen samples, whose indices the plan holds (not positions).

    A sample longer than the budget gets a micro-batch of its own.
    """
    lengths = [samples[index].length for index in chosen]
    long = [index for index, length in zip(chosen, lengths, strict=True) if length > token_budget]
    fitting = [i for i, length in zip(chosen, lengths, strict=True) if length <= token_budget]
    plan = pack(
        [samples[index].length for index in fitting],
        token_budget=token_budget,
        num_ranks=num_ranks,
        hidden_size=hidden_size,
    )
    renamed = [
        [tuple(fitting[i] for i in batch) for batch in rank]
        for rank in plan.micro_batches
        if fitting or not long
    ] or [[] for _ in range(num_ranks)]
    # Long ones side by side, the longest together; ranks without one get a dummy.
    alone = sorted(long, key=lambda index: (-samples[index].length, index))
    alone_per_rank = -(-len(alone) // num_ranks)
    for place in range(alone_per_rank * num_ranks):
        batch = (alone[place],) if place < len(alone) else ()
        renamed[place % num_ranks].append(batch)
    return PackPlan(
        micro_batches=tuple(tuple(rank) for rank in renamed),
        token_efficiency=plan.token_efficiency,
        work_efficiency=plan.work_efficiency,
        num_dummies=sum(1 for rank in renamed for batch in rank if not batch),
    )


def build_micro_batch(
    samples: Sequence[Sample], indices: Sequence[int], *, device: torch.device | str
) -> MicroBatch:
    """Tensors of these samples; without any, a dummy of one token that predicts nothing."""
    chosen = [(index, samples[index]) for index in indices if samples[index].length]
    tokens = [sample.tokens for _, sample in chosen] or [np.zeros(1, dtype=np.int32)]
    starts = np.cumsum([0, *(part.shape[0] for part in tokens)])
    positions = [s.sampled + start for (_, s), start in zip(chosen, starts, strict=False)]
    flat = np.concatenate(tokens).astype(np.int64)
    position_M = _join(positions, np.int64)
    counts = [sample.response_tokens for _, sample in chosen]

    def put(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return MicroBatch(
        tokens_T=put(flat),
        layout=document_layout([part.shape[0] for part in tokens], device=device),
        predictors_M=put(position_M - 1),
        targets_M=put(flat[position_M]),
        temperatures_M=put(
            np.repeat(np.array([s.temperature for _, s in chosen], dtype=np.float32), counts)
        ),
        sampler_M=put(_join([s.sampler_logprobs for _, s in chosen], np.float32)),
        samples_M=put(np.repeat(np.array([i for i, _ in chosen], dtype=np.int64), counts)),
    )


def _join(parts: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts]).astype(dtype)


def split_updates(samples: Sequence[Sample], num_updates: int) -> list[list[int]]:
    """Sample indices of each update: whole groups, in order, in parts as equal as they can be."""
    by_group: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        by_group.setdefault(sample.group_id, []).append(index)
    groups = list(by_group.values())
    parts = np.array_split(np.arange(len(groups)), min(num_updates, max(len(groups), 1)))
    return [[index for g in part for index in groups[g]] for part in parts if part.size]
