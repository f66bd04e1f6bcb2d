"""A buffer for the learner's tests: groups of a one-token game, made when they are taken.

The prompt is a letter, the right answer the same letter; a group's rewards say how many of its
rollouts have it. It samples with the published policy when asked to (`sample`), so that training
on it raises the reward; otherwise groups are a function of their id alone.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from prorl_hpc.buffer.messages import VALIDATION_BASE, GroupIds, GroupRef
from prorl_hpc.records import Group, Kind, Outcome, Trajectory

Sampler = Callable[[np.ndarray, int], np.ndarray]
"""(prompt ids, seed) -> log-probabilities over the vocabulary."""


@dataclass
class FakeClient:
    """Stands for `LearnerClient` and `GroupReader`; keeps what the learner told it."""

    vocabulary: int
    num_rollouts: int = 4
    letters: tuple[int, ...] = (5, 6, 7, 8)
    sampler: Sampler | None = None
    degenerate: Callable[[int], bool] = lambda group_id: False
    batch_groups: int | None = None
    """Hands out no more than one batch per version, as a buffer with staleness 0 does."""
    phase: str = "running"
    version: int = 0
    consumed: GroupIds = field(default_factory=GroupIds)
    taken: set[int] = field(default_factory=set)
    calls: list[tuple[str, object]] = field(default_factory=list)
    finished: str | None = None

    def announce(self, version: int, *, consumed: GroupIds, filtered: int, step: int) -> None:
        self.calls.append(("announce", (version, len(consumed), filtered, step)))
        self.version, self.consumed, self.taken = version, consumed, set()

    def take(self, num_groups: int, *, timeout_seconds: float) -> list[GroupRef]:
        refs: list[GroupRef] = []
        group_id = 0
        while len(refs) < num_groups:
            if group_id >= self._limit():
                time.sleep(0.002)
                break
            if group_id not in self.consumed and group_id not in self.taken:
                self.taken.add(group_id)
                refs.append(self._ref(group_id, Kind.train))
            group_id += 1
        return refs

    def _limit(self) -> float:
        if self.batch_groups is None:
            return float("inf")
        told = [total for name, total in self.calls if name == "filtered"]
        return (self.version + 1) * self.batch_groups + (told[-1] if told else 0)  # type: ignore[operator,no-any-return]

    def published(self, version: int) -> None:
        self.calls.append(("published", version))
        self.version = version

    def filtered(self, total: int) -> None:
        self.calls.append(("filtered", total))

    def checkpointed(self, step: int, consumed: GroupIds) -> None:
        self.calls.append(("checkpointed", step))

    def damaged(self, shard: int, *, group_id: int, reason: str) -> None:
        self.calls.append(("damaged", (shard, group_id)))

    def validate(self, version: int, counts: dict[str, int], num_rollouts: int) -> None:
        self.calls.append(("validate", version))

    def validation_results(
        self, version: int, timeout_seconds: float = 0.0
    ) -> list[GroupRef] | None:
        return [self._ref(VALIDATION_BASE + i, Kind.validation) for i in range(8)]

    def validation_given_up(self, version: int) -> int:
        return 0

    def finish(self, reason: str) -> None:
        self.finished = reason

    def close(self) -> None:
        pass

    def _ref(self, group_id: int, kind: Kind) -> GroupRef:
        return GroupRef(
            group_id=group_id,
            kind=kind,
            task="letters",
            instance_id=str(group_id),
            members=tuple((0, i) for i in range(self.num_rollouts)),
            num_rollouts=self.num_rollouts,
        )

    def read(self, ref: GroupRef) -> Group:
        """The group that `ref` names."""
        letter = self.letters[ref.group_id % len(self.letters)]
        rng = np.random.default_rng([ref.group_id, 7])
        trajectories = []
        for index in range(self.num_rollouts):
            prompt = np.array([2, letter], dtype=np.int32)
            if self.sampler is None:
                # Half of the rollouts are right, so that every group has a signal.
                answer = letter if index % 2 == 0 else int(rng.integers(9, self.vocabulary))
                logprob = -1.0
            else:
                logprobs = self.sampler(prompt, ref.group_id)
                chances = np.exp(logprobs.astype(np.float64))
                answer = int(rng.choice(self.vocabulary, p=chances / chances.sum()))
                logprob = float(logprobs[answer])
            if self.degenerate(ref.group_id):
                answer = letter
            trajectories.append(
                trajectory(
                    group_id=ref.group_id,
                    index=index,
                    kind=ref.kind,
                    tokens=[*prompt.tolist(), answer, *([1] if self.sampler is None else [])],
                    num_prompt=2,
                    logprob=logprob,
                    version=self.version,
                    reward=float(answer == letter),
                )
            )
        return Group(
            group_id=ref.group_id,
            kind=ref.kind,
            task="letters",
            instance_id=ref.instance_id,
            trajectories=tuple(trajectories),
        )


def trajectory(
    *,
    group_id: int,
    index: int,
    tokens: list[int],
    num_prompt: int,
    reward: float | None,
    kind: Kind = Kind.train,
    logprob: float = -1.0,
    version: int = 0,
    outcome: Outcome = Outcome.scored,
    finish_reason: str = "stop",
    task: str = "letters",
) -> Trajectory:
    """A trajectory whose tokens after the prompt were all sampled by one version."""
    length = len(tokens)
    mask = np.zeros(length, dtype=np.uint8)
    mask[num_prompt:] = 1
    sampled = mask.astype(bool)
    return Trajectory(
        group_id=group_id,
        rollout_index=index,
        kind=kind,
        task=task,
        instance_id=str(group_id),
        tokens=np.array(tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(sampled, logprob, 0.0).astype(np.float32),
        versions=np.where(sampled, version, -1).astype(np.int32),
        reward=reward,
        outcome=outcome,
        finish_reason=finish_reason,
    ).check()
