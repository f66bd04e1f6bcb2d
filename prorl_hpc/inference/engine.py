"""Token-in/token-out interface of every inference engine. Knows no text, task or file layout."""

from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What came out, token by token; all three sequences have the same length."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    """Policy version that made each token."""
    finish_reason: str
    """`stop`, `length` or `abort`."""


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

    async def load(self, version: int, *, path: Path) -> None:
        """Moves to a published policy version without dropping what is in flight."""

    @property
    def version(self) -> int:
        """Version that new tokens are sampled from."""

    async def close(self) -> None:
        """Frees everything."""
