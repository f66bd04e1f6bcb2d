"""One step's groups from the buffer: fresh enough, with a signal, shaped. Rank 0 only.

Knows the buffer's client and the recipe; no model and no tensors.

    take --> stale? --> degenerate? --> enough? --no--> tell the buffer, take what is missing
                                          |yes, or max_refills used up
                                          +--> shape rewards --> Batch
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hpc.errors import HpcError
from prorl_hpc.buffer.messages import GroupIds, GroupRef
from prorl_hpc.learner.batches import Sample, samples_of
from prorl_hpc.learner.correction import decide_staleness
from prorl_hpc.learner.filtering import (
    EffectiveSamples,
    FilterResult,
    RefillAction,
    decide_refill,
    filter_groups,
)
from prorl_hpc.learner.preflight import longest_response
from prorl_hpc.learner.shaping import shape_rewards
from prorl_hpc.learner.stages import stage_at
from prorl_hpc.recipe import Recipe
from prorl_hpc.records import Group

POLL_SECONDS = 2.0
"""How long one question to the buffer waits, so that a stop request is noticed."""


class NoBatch(HpcError, TimeoutError):
    """The buffer gave no batch within the bound; the message names who was missing."""


class TooFewGroups(HpcError, RuntimeError):
    """A step's draws gave too few groups with a signal, and the recipe wants no partial batch."""


class GroupSource(Protocol):
    """The part of the buffer's client that collecting needs."""

    @property
    def phase(self) -> str: ...

    def take(self, num_groups: int, *, timeout_seconds: float) -> list[GroupRef]: ...

    def filtered(self, total: int) -> None: ...

    def damaged(self, shard: int, *, group_id: int, reason: str) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one step trains on; sent to all ranks."""

    samples: tuple[Sample, ...]
    shaped_rewards: tuple[float, ...]
    consumed: GroupIds
    """Groups trained, filtered out and dropped for this step."""
    counts: EffectiveSamples
    metrics: dict[str, float]
    tasks: dict[str, dict[str, float]]
    """Metrics by task."""


@dataclass(kw_only=True, slots=True)
class _Seen:
    """What was taken for this step so far."""

    kept: list[Group] = field(default_factory=list)
    consumed: list[int] = field(default_factory=list)
    counts: EffectiveSamples = field(default_factory=EffectiveSamples)
    rewards: dict[str, list[float]] = field(default_factory=dict)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    verdicts: dict[str, int] = field(default_factory=dict)
    staleness: list[int] = field(default_factory=list)
    max_staleness: int = 0


class Collector:
    """Collects the batch of a step."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        source: GroupSource,
        read: Callable[[GroupRef], Group],
        stopping: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recipe = recipe
        self._source = source
        self._read = read
        self._stopping = stopping
        self._now = now
        self._temperatures = {
            name: recipe.algorithm.temperature if task.temperature is None else task.temperature
            for name, task in recipe.tasks.items()
        }

    def collect(
        self, *, step: int, version: int, num_consumed: int, roll_backs: int = 0
    ) -> Batch | None:
        """The batch of step `step` (from 0), or None when the learner is to stop.

        `num_consumed`: groups consumed before this step; `roll_backs`: policy versions beside those
        of the steps. Raises NoBatch when the bound is over, and TooFewGroups where
        `algorithm.on_exhausted=error` and the draws are used up.
        """
        algorithm = self._recipe.algorithm
        started = self._now()
        deadline = started + self._recipe.learner.batch_seconds
        seen = _Seen()
        wanted, rounds = algorithm.batch_groups, 0
        while True:
            missing = wanted - len(seen.kept)
            groups = self._take(missing, deadline=deadline)
            if groups is None:
                return None
            self._sort(groups, seen, version=version)
            rounds += 1
            decision = decide_refill(
                kept_groups=len(seen.kept),
                seen_groups=max(len(seen.consumed), 1),
                wanted_groups=wanted,
                rounds_used=rounds,
                max_rounds=1 + algorithm.max_refills,
                on_exhausted=algorithm.on_exhausted,
            )
            if decision.action is RefillAction.fail:
                raise TooFewGroups(f"step {step + 1}: {decision.reason}")
            if decision.action is not RefillAction.refill:
                break
            # Not the trained ones: a partial step leaves fewer groups to replace.
            self._source.filtered(
                num_consumed + len(seen.consumed) - (step + roll_backs) * wanted - len(seen.kept)
            )
        return self._batch(seen, step=step, rounds=rounds, seconds=self._now() - started)

    def _take(self, num_groups: int, *, deadline: float) -> list[Group] | None:
        groups: list[Group] = []
        while len(groups) < num_groups:
            if self._stopping():
                return None
            left = deadline - self._now()
            if left <= 0:
                raise NoBatch(self._complaint(len(groups), num_groups))
            refs = self._source.take(
                num_groups - len(groups), timeout_seconds=min(left, POLL_SECONDS)
            )
            for ref in refs:
                group = self._read_or_report(ref)
                if group is not None:
                    groups.append(group)
            if self._source.phase != "running" and not refs:
                return None
        return groups

    def _read_or_report(self, ref: GroupRef) -> Group | None:
        from prorl_hpc.buffer.shard import ShardDamaged

        try:
            return self._read(ref)
        except ShardDamaged as err:
            self._source.damaged(err.shard, group_id=ref.group_id, reason=str(err))
            return None

    def _complaint(self, have: int, want: int) -> str:
        status = getattr(self._source, "status", None)
        found = None if status is None else status()
        note = ""
        if found is not None:
            note = (
                f"; the buffer has {found.workers} rollout workers, {found.leases} leases, "
                f"{found.groups_open} open groups. {found.note}"
            )
        return (
            f"{have} of {want} groups came within learner.batch_seconds="
            f"{self._recipe.learner.batch_seconds:g}; see the rollout jobs' logs{note}"
        )

    def _sort(self, groups: Sequence[Group], seen: _Seen, *, version: int) -> None:
        """Puts groups where they belong: stale, without signal, or kept."""
        algorithm = self._recipe.algorithm
        samples = samples_of(groups, temperatures=self._temperatures)
        for sample in samples:
            seen.rewards.setdefault(sample.task, []).append(sample.reward)
            seen.lengths.setdefault(sample.task, []).append(sample.response_tokens)
        ids = [sample.group_id for sample in samples]
        # A version of a history that a crash lost is as fresh as can be.
        oldest = [
            None if s.oldest_version is None else min(s.oldest_version, version) for s in samples
        ]
        fresh = decide_staleness(
            oldest,
            ids,
            learner_version=version,
            max_staleness=algorithm.max_staleness,
            policy=algorithm.stale,
        )
        seen.staleness += [version - v for v in oldest if v is not None]
        seen.max_staleness = max(seen.max_staleness, fresh.max_staleness)
        kept = [s for s, keep in zip(samples, fresh.keep, strict=True) if keep]
        filtered = filter_groups([s.reward for s in kept], [s.group_id for s in kept])
        good = (
            {s.group_id for s, keep in zip(kept, filtered.keep, strict=True) if keep}
            if algorithm.filter_degenerate
            else {s.group_id for s in kept}
        )
        seen.kept += [group for group in groups if group.group_id in good]
        seen.consumed += [group.group_id for group in groups]
        stale = len(set(ids)) - len({s.group_id for s in kept})
        seen.counts = seen.counts.add(filtered=filtered, stale_groups=stale)
        self._count(seen, filtered, empty=len(groups) - len(set(ids)), stale=stale)

    @staticmethod
    def _count(seen: _Seen, filtered: FilterResult, *, empty: int, stale: int) -> None:
        for name, number in (
            ("equal_low", filtered.num_equal_low),
            ("equal_high", filtered.num_equal_high),
            ("too_few", filtered.num_too_few + empty),
            ("stale", stale),
        ):
            seen.verdicts[name] = seen.verdicts.get(name, 0) + number

    def _batch(self, seen: _Seen, *, step: int, rounds: int, seconds: float) -> Batch:
        samples = samples_of(seen.kept, temperatures=self._temperatures)
        shaped, terms = self._shape(samples, step=step)
        rewards = [r for values in seen.rewards.values() for r in values]
        lengths = [n for values in seen.lengths.values() for n in values]
        metrics = {f"groups_{name}": float(number) for name, number in seen.verdicts.items()}
        metrics |= {
            "groups_seen": float(len(seen.consumed)),
            "groups_trained": float(len(seen.kept)),
            "reward": _mean(rewards),
            "trained_reward": _mean([s.reward for s in samples]),
            "response_tokens": _mean(lengths),
            "response_tokens_max": float(max(lengths, default=0)),
            "stopped": _mean([float(s.stopped) for s in samples]),
            "staleness": _mean(seen.staleness),
            "staleness_max": float(seen.max_staleness),
            "draws": float(rounds),
            "wait_seconds": seconds,
        }
        metrics |= {f"shaping_{name}": value for name, value in terms.items()}
        tasks = {
            task: {
                "reward": _mean(values),
                "response_tokens": _mean(seen.lengths[task]),
                "rollouts": float(len(values)),
            }
            for task, values in sorted(seen.rewards.items())
        }
        return Batch(
            samples=tuple(samples),
            shaped_rewards=tuple(shaped),
            consumed=GroupIds.of(seen.consumed),
            counts=seen.counts.add(trained_groups=len(seen.kept), trained_rollouts=len(samples)),
            metrics=metrics,
            tasks=tasks,
        )

    def _shape(
        self, samples: Sequence[Sample], *, step: int
    ) -> tuple[list[float], dict[str, float]]:
        """Shaped rewards in the samples' order, and the mean of each term, task by task."""
        recipe = self._recipe
        stage = stage_at(
            step,
            recipe.algorithm.stages,
            context_tokens=recipe.model.context_tokens,
            num_rollouts=recipe.algorithm.num_rollouts,
        )
        shaped = [0.0] * len(samples)
        terms: dict[str, float] = {}
        for task in sorted({sample.task for sample in samples}):
            chosen = [i for i, sample in enumerate(samples) if sample.task == task]
            result = shape_rewards(
                [samples[i].reward for i in chosen],
                [samples[i].response_tokens for i in chosen],
                [samples[i].stopped for i in chosen],
                config=recipe.algorithm.shaping,
                max_tokens=longest_response(recipe, task=task, context_tokens=stage.context_tokens),
                update=step,
            )
            for place, value in zip(chosen, result.rewards.tolist(), strict=True):
                shaped[place] = value
            for name, value in result.terms.items():
                terms[name] = terms.get(name, 0.0) + value * len(chosen) / len(samples)
        return shaped, terms


def _mean(values: Sequence[float] | Sequence[int]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
