"""The records that travel between rollout, buffer and learner. Knows no file and no socket.

Legend of shapes: T tokens of one trajectory (prompt, completions and observations in order).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpc.errors import HpcError

JSON = Any
"""A decoded JSON value of the user's data set; never inspected without decoding it first."""


MAX_TOKEN_ID = (1 << 24) - 1
"""Three bytes, on the wire and on disk."""


class RecordError(HpcError, ValueError):
    """A trajectory that breaks the contract; the message names the field and the value."""


class Outcome(StrEnum):
    """How one attempt at an instance ended."""

    scored = "scored"
    truncated = "truncated"
    """Token, context or turn limit; scored as it stands."""
    agent_timeout = "agent_timeout"
    invalid = "invalid"
    """The agent's answer can't be scored (no answer, malformed); reward 0 by the task's rule."""
    infrastructure_failure = "infrastructure_failure"
    """Not the agent's fault: retried, then masked; never a reward."""

    @property
    def usable(self) -> bool:
        """Whether the learner may train on it."""
        return self is not Outcome.infrastructure_failure


class Kind(StrEnum):
    """What a group is for."""

    train = "train"
    validation = "validation"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One chat message of a prompt."""

    role: str
    content: str


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One problem of a task, as a rollout node sees it."""

    task: str
    instance_id: str
    index: int
    messages: tuple[Message, ...]
    answer: JSON = None
    """What the verifier needs; never shown to the agent nor put into its sandbox."""
    metadata: dict[str, JSON] = msgspec.field(default_factory=dict)


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What a verifier says of one attempt."""

    reward: float
    components: dict[str, float] = msgspec.field(default_factory=dict)
    outcome: Outcome = Outcome.scored


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout node's right to produce the named rollouts of one group."""

    lease_id: int
    group_id: int
    kind: Kind
    task: str
    instance_index: int
    """Index into the task's split of that kind."""
    rollouts: tuple[int, ...]
    """Rollout indices to produce (only the missing ones, after a loss)."""
    num_rollouts: int
    """Rollouts of the whole group."""
    seed: int
    """Seed of the group; a rollout's randomness is derived from (seed, rollout index, turn)."""
    policy_version: int | None
    """Version that must sample (validation, deterministic mode); None: the newest."""
    deadline_seconds: float
    """Seconds from now until the group closes without what is missing."""
    context_tokens: int | None = None
    """Context limit of the current stage; None: the recipe's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One attempt at an instance, as token ids. Identified by (group_id, rollout_index)."""

    group_id: int
    rollout_index: int
    kind: Kind
    task: str
    instance_id: str
    tokens: NDArray[np.int32]
    """[T] prompt, completions and observations."""
    loss_mask: NDArray[np.uint8]
    """[T] 1 only on tokens that the policy sampled."""
    logprobs: NDArray[np.float32]
    """[T] sampler's log-probability of sampled tokens; 0 elsewhere."""
    versions: NDArray[np.int32]
    """[T] policy version that sampled the token; -1 elsewhere."""
    reward: float | None
    """None exactly when the outcome is an infrastructure failure."""
    components: dict[str, float] = field(default_factory=dict)
    outcome: Outcome = Outcome.scored
    finish_reason: str = "stop"
    """`stop`, `length`, `turns`, `time`, `error`: why the last turn ended."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds per stage: `init`, `run`, `eval`, `queue`, ..."""
    isolation: dict[str, str] = field(default_factory=dict)
    """How the environment was isolated; empty without an environment."""
    worker: str = ""
    attempt: int = 0
    detail: str = ""
    """One line on what went wrong, for people."""

    @property
    def key(self) -> tuple[int, int]:
        return (self.group_id, self.rollout_index)

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(a.nbytes for a in (self.tokens, self.loss_mask, self.logprobs, self.versions))

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version of a sampled token; None when nothing was sampled."""
        sampled = self.versions[self.loss_mask == 1]
        return int(sampled.min()) if sampled.size else None

    def sampled_only_by(self, version: int) -> bool:
        """Whether no other policy version sampled a token of it."""
        return bool((self.versions[self.loss_mask == 1] == version).all())

    def check(self) -> "Trajectory":
        """Returns itself; raises RecordError when a field breaks the contract."""
        name = f"trajectory {self.key}"
        length = self.tokens.shape[0]
        for label, array, dtype in (
            ("tokens", self.tokens, np.int32),
            ("loss_mask", self.loss_mask, np.uint8),
            ("logprobs", self.logprobs, np.float32),
            ("versions", self.versions, np.int32),
        ):
            if array.ndim != 1 or array.shape[0] != length or array.dtype != dtype:
                raise RecordError(
                    f"{label} of {name} is {array.dtype}{array.shape}; "
                    f"want {np.dtype(dtype)}[{length}]"
                )
        if length and self.loss_mask.max() > 1:
            raise RecordError(f"{name} has a mask value above 1")
        # Seen without its sign, a negative number is a large one.
        if length and self.tokens.view(np.uint32).max() > MAX_TOKEN_ID:
            raise RecordError(f"{name} has a negative token id, or one above {MAX_TOKEN_ID}")
        check_reward(self.reward, outcome=self.outcome, name=name)
        check_components(self.components, name=name)
        return self


def check_components(components: Mapping[str, float], *, name: str) -> None:
    """Raises RecordError for one that is no finite number."""
    for label, value in components.items():
        # JSON has no such number: the shard could be written and not be read again.
        if not math.isfinite(value):
            raise RecordError(f"component {label}={value!r} of {name} is not finite")


def check_reward(reward: object, *, outcome: Outcome, name: str) -> None:
    """Raises RecordError for a boolean, missing, non-numeric or non-finite reward."""
    if outcome is Outcome.infrastructure_failure:
        if reward is not None:
            raise RecordError(
                f"reward={reward!r} of {name}: an infrastructure failure has no reward"
            )
        return
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise RecordError(f"reward={reward!r} of {name} is not a number; give a finite float")
    if not math.isfinite(reward):
        raise RecordError(f"reward={reward!r} of {name} is not finite; give a finite float")


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All usable trajectories of one instance: the unit of GRPO and of training."""

    group_id: int
    kind: Kind
    task: str
    instance_id: str
    trajectories: tuple[Trajectory, ...]
    """In the order of their rollout index; infrastructure failures are left out."""
