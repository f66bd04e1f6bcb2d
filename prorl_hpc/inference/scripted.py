"""An engine that replays given texts: for replay policies and tests. Knows no model."""

from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

from prorl_hpc.inference.engine import Chunk, Completion, EngineError, Sampling, as_one_chunk

Answer = Callable[[tuple[int, ...], str], str]
"""(prompt ids, affinity) -> the text to answer."""


class ScriptedEngine:
    """Answers with the given texts, in turn per affinity, or with what a function says.

    Every answer ends with the first stop token, cut at `max_new_tokens`. Log-probabilities are 0:
    the script is certain of what it says.
    """

    def __init__(
        self, tokenizer: Any, answers: Sequence[str] | Answer, *, version: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._answers = answers
        self._version = version
        self._turns: dict[str, int] = {}

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        """Nothing to load."""

    async def generate(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> Completion:
        """Raises EngineError when the script has no more answers for this conversation."""
        ids = self._tokenizer.encode(self._text(prompt_ids, affinity), add_special_tokens=False)
        ids += sampling.stop_token_ids[:1]
        cut = tuple(ids[: sampling.max_new_tokens])
        return Completion(
            token_ids=cut,
            logprobs=(0.0,) * len(cut),
            versions=(self._version,) * len(cut),
            finish_reason="stop" if len(cut) == len(ids) else "length",
        )

    def stream(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        return as_one_chunk(self.generate(prompt_ids, sampling=sampling, affinity=affinity))

    async def load(self, version: int, *, path: Path) -> None:  # noqa: ARG002
        """The script stays the same; only the stamp changes."""
        self._version = version

    async def close(self) -> None:
        """Nothing to free."""

    def _text(self, prompt_ids: tuple[int, ...], affinity: str) -> str:
        if callable(self._answers):
            return self._answers(prompt_ids, affinity)
        turn = self._turns.get(affinity, 0)
        if turn >= len(self._answers):
            raise EngineError(f"the script has {len(self._answers)} answers, {turn + 1} were asked")
        self._turns[affinity] = turn + 1
        return self._answers[turn]
