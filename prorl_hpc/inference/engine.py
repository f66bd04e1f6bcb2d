"""Token-in/token-out interface of every inference engine. Knows no text, task or file layout."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from hpc.errors import HpcError


class EngineError(HpcError, RuntimeError):
    """The engine can't serve this request or this version: an infrastructure failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn. Log-probabilities are those of exactly this distribution."""

    temperature: float
    """0 means greedy (log-probabilities then are those at temperature 1)."""
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends with the first of these; it is part of the completion."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off. Training refuses top_p < 1 and top_k > 0."""
    seed: int | None = None
    policy_version: int | None = None
    """Version that must make the tokens; None: any. Where the caller holds the engine at a version
    itself (`rollout.versions`), the engine need not look at it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What came out, token by token; all three sequences have the same length."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    """Policy version that made each token."""
    finish_reason: str
    """`stop`, `length` or `abort`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """The next tokens of a stream; all three sequences have the same length, 0 in a bare end."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str | None = None
    """Set in the last chunk alone: `stop`, `length` or `abort`."""


class Engine(Protocol):
    """One inference engine, or a pool of them behind one face."""

    async def start(self) -> None:
        """Loads the model; raises EngineError with the engine's own last words."""

    async def generate(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> Completion:
        """Continues `prompt_ids`. Requests with equal `affinity` share a prefix cache if they can.

        Raises EngineError when the engine fails; cancelling the awaiting task cancels the request.
        """

    def stream(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        """The same as chunks, as they come; the last one has a finish reason.

        Closing the generator early (`contextlib.aclosing`) cancels the request. Raises EngineError,
        also when a stream turns out at its end to have stamped a token with the wrong version.
        """

    async def load(self, version: int, *, path: Path) -> None:
        """Moves to a published policy version without dropping what is in flight."""

    @property
    def version(self) -> int:
        """Version that new tokens are sampled from."""

    async def close(self) -> None:
        """Frees everything."""


async def as_one_chunk(completion: Awaitable[Completion]) -> AsyncGenerator[Chunk, None]:
    """The stream of an engine that has only whole answers."""
    done = await completion
    yield Chunk(
        token_ids=done.token_ids,
        logprobs=done.logprobs,
        versions=done.versions,
        finish_reason=done.finish_reason,
    )


Watch = Callable[[Sequence[int]], None]
"""Gets all token ids of an answer so far; keeps none of the list, which grows."""


async def put_together(stream: AsyncGenerator[Chunk, None], watch: Watch) -> Completion:
    """A stream's whole answer; `abort` for one that broke off."""
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    finish = "abort"
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            ids += chunk.token_ids
            logprobs += chunk.logprobs
            versions += chunk.versions
            finish = chunk.finish_reason or finish
            watch(ids)
    return Completion(
        token_ids=tuple(ids),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        finish_reason=finish,
    )


def finish_of(token_ids: tuple[int, ...] | list[int], sampling: Sampling) -> str | None:
    """Why these tokens are a whole answer; None while they are not."""
    if token_ids and token_ids[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if len(token_ids) >= sampling.max_new_tokens else None


def continued(sampling: Sampling, *, num_made: int) -> Sampling:
    """What is left to ask for when `num_made` tokens are there already.

    The seed moves along: with the old one the first tokens' random numbers would come again.
    """
    if not num_made:
        return sampling
    seed = sampling.seed
    if seed is not None:
        seed = (seed + num_made * 0x9E3779B97F4A7C15) % 2**63
    return replace(sampling, max_new_tokens=sampling.max_new_tokens - num_made, seed=seed)
