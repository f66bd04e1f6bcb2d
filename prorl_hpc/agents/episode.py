"""One conversation as it grows, token by token. Knows an engine and a tokenizer, no task.

    prompt ids | sampled answer | suffix with observation | sampled answer | ...
    mask 0     | mask 1         | mask 0                  | mask 1         |

What the engine returned is kept as it came; limits end the conversation with a typed reason.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from prorl_hpc.agents.render import (
    ObservationRenderer,
    ToolSchema,
    decode_answer,
    render_prompt,
    stop_ids,
)
from prorl_hpc.environment.base import Environment, EnvironmentSpec
from prorl_hpc.inference.engine import (
    Completion,
    Engine,
    EngineError,
    Sampling,
    Watch,
    put_together,
)
from prorl_hpc.records import Message


def derive_seed(seed: int, rollout_index: int, turn: int) -> int:
    """The sampling seed of one turn: a function of the group's seed and its place alone."""
    digest = hashlib.sha256(f"{seed}/{rollout_index}/{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one conversation may use."""

    context_tokens: int
    """Prompt, answers and observations together."""
    max_new_tokens: int
    """Per answer."""
    max_turns: int


@dataclass(kw_only=True, slots=True)
class Transcript:
    """The tokens so far, with who made them."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def given(self, ids: Sequence[int]) -> None:
        """Tokens that the policy didn't sample."""
        self.tokens += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def sampled(
        self, ids: Sequence[int], *, logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """Tokens of one answer."""
        self.tokens += ids
        self.loss_mask += [1] * len(ids)
        self.logprobs += logprobs
        self.versions += versions

    def arrays(
        self,
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.float32], NDArray[np.int32]]:
        """Tokens, loss mask, log-probabilities, versions: each [T]."""
        return (
            np.asarray(self.tokens, dtype=np.int32),
            np.asarray(self.loss_mask, dtype=np.uint8),
            np.asarray(self.logprobs, dtype=np.float32),
            np.asarray(self.versions, dtype=np.int32),
        )


class Conversation:
    """One attempt at an instance, from the side of the agent."""

    def __init__(
        self,
        *,
        tokenizer: Any,
        engine: Engine,
        sampling: Sampling,
        limits: Limits,
        seed: int,
        rollout_index: int,
        affinity: str = "",
    ) -> None:
        """`sampling` is the pattern of every turn; its seed and token limit are replaced."""
        self.transcript = Transcript()
        self.finish_reason = "stop"
        """Why it ended: `stop`, `length` (tokens or context) or `turns`."""
        self.over = False
        self.turns = 0
        self.text = ""
        """The last answer."""
        self.note = ""
        """One line on how it went, for people."""
        self.counts: dict[str, float] = {}
        """What an agent counts; components of the trajectory."""
        self.tokenizer = tokenizer
        self.limits = limits
        self._engine = engine
        self._sampling = sampling
        self._seed = seed
        self.rollout_index = rollout_index
        self._affinity = affinity
        self.stops = stop_ids(tokenizer)
        self._answer_ids: tuple[int, ...] = ()

    @property
    def truncated(self) -> bool:
        return self.finish_reason in ("length", "turns")

    def begin(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> None:
        """Writes the prompt; one that fills the context ends the conversation at once."""
        ids = render_prompt(self.tokenizer, messages, tools=tools)
        self.transcript.given(ids[: self.limits.context_tokens])
        if len(ids) >= self.limits.context_tokens:
            self.end("length")

    async def answer(self) -> str:
        """Samples the next answer and returns its text; empty once the conversation is over.

        An answer cut by a token limit is kept and ends the conversation. Raises EngineError.
        """
        if not self.over and self.turns >= self.limits.max_turns:
            self.end("turns")
        if self.over:
            return ""
        completion = await self.sample(tuple(self.transcript.tokens))
        self.transcript.sampled(
            completion.token_ids, logprobs=completion.logprobs, versions=completion.versions
        )
        self._answer_ids = completion.token_ids
        self.text = decode_answer(self.tokenizer, completion.token_ids)
        if completion.finish_reason == "length":
            self.end("length")
        return self.text

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        *,
        max_new_tokens: int | None = None,
        watch: Watch | None = None,
    ) -> Completion:
        """One answer to any prompt, as the next turn; what becomes of it is the caller's affair.

        `max_new_tokens` can only lower the limit. `watch` gets the answer's ids, all of them, each
        time that there are more. The prompt must leave room. Raises EngineError.
        """
        turn, self.turns = self.turns, self.turns + 1
        most = self.limits.max_new_tokens
        if max_new_tokens is not None:
            most = min(most, max_new_tokens)
        sampling = Sampling(
            temperature=self._sampling.temperature,
            max_new_tokens=min(self.limits.context_tokens - len(prompt_ids), most),
            stop_token_ids=self.stops,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            policy_version=self._sampling.policy_version,
            seed=derive_seed(self._seed, self.rollout_index, turn),
        )
        if watch is None:
            completion = await self._engine.generate(
                prompt_ids, sampling=sampling, affinity=self._affinity
            )
        else:
            stream = self._engine.stream(prompt_ids, sampling=sampling, affinity=self._affinity)
            completion = await put_together(stream, watch)
        if completion.finish_reason == "abort":
            raise EngineError("the engine gave up an answer (finish reason `abort`)")
        return completion

    def observe(self, observations: Sequence[str], *, render: ObservationRenderer) -> None:
        """Appends what the environment said; without room for it the conversation is over."""
        if not self.over and self.turns >= self.limits.max_turns:
            self.end("turns")
        if self.over:
            return
        ids = render(self._answer_ids, observations)
        if len(self.transcript.tokens) + len(ids) >= self.limits.context_tokens:
            self.end("length")
            return
        self.transcript.given(ids)

    def end(self, reason: str) -> None:
        """No more turns, for this reason."""
        self.over = True
        self.finish_reason = reason


class Agent(Protocol):
    """How a model is led through an episode."""

    needs_environment: bool

    async def run(
        self,
        conversation: Conversation,
        *,
        messages: Sequence[Message],
        environment: Environment | None,
    ) -> None:
        """Leads the conversation to its end.

        Raises EngineError, SandboxError (infrastructure) and EnvironmentEnded (the agent's doing).
        """


@runtime_checkable
class Furnisher(Protocol):
    """An agent that brings something into its environment, beside what the task puts there."""

    def furnish(self, spec: EnvironmentSpec) -> EnvironmentSpec:
        """The agent's environment; the one for scoring stays as the task asks."""
        ...
