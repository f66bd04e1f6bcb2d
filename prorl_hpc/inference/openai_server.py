"""An endpoint that speaks OpenAI's completions API, run by somebody else. Loads no tokenizer.

What such endpoints take and give differs; `meet` finds out which of two dialects this one speaks:

    tokens   prompt as ids, `return_token_ids`: ids and log-probabilities come back as they were
             (vLLM; whether the log-probabilities include the temperature is the server's setting)
    text     prompt as text; the answer's text is tokenised here, its log-probabilities are unknown
             and given as 0
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from prorl_hpc.inference.engine import (
    Chunk,
    Completion,
    EngineError,
    Sampling,
    as_one_chunk,
    finish_of,
)
from prorl_hpc.inference.http import Channel, RequestRefused, ServerGone
from prorl_hpc.inference.server import LoadFailed, Models

MEET_SECONDS = 120.0
"""A first answer may have to wait for a cold model."""


MAX_STOPS = 4
"""Stop strings that the API takes."""


class Dialect(StrEnum):
    """What an endpoint takes and gives."""

    tokens = "tokens"
    text = "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """A tokenizer as far as the text dialect needs it."""

    encode: Callable[[str], Sequence[int]]
    """Without special tokens added."""
    decode: Callable[[Sequence[int]], str]
    """With special tokens written out."""


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Failure(msgspec.Struct, frozen=True):
    message: str = ""


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    error: _Failure | str | None = None


class OpenAiServer:
    """One endpoint. `meet` it before anything else."""

    def __init__(
        self,
        address: str,
        *,
        version: int,
        words: Words,
        model: str | None = None,
        key: str = "",
        request_seconds: float = 1800.0,
    ) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else None
        self._channel = Channel(address, headers=headers)
        self._version = version
        self._words = words
        self._model = model
        self._request_seconds = request_seconds
        self.dialect = Dialect.tokens

    @property
    def address(self) -> str:
        return self._channel.address

    @property
    def version(self) -> int:
        """The one that tokens are stamped with; nothing is known of the weights."""
        return self._version

    async def meet(self) -> None:
        """Finds the model and the dialect. Raises EngineError for an endpoint of neither."""
        names = await self._names()
        if self._model is None:
            if not names:
                raise RequestRefused(
                    f"{self.address} lists no model; name one: rollout.engine.model=NAME"
                )
            self._model = names[0]
        # Any token will do as a prompt; one that no vocabulary lacks.
        sampling = Sampling(temperature=1.0, max_new_tokens=1)
        refusals: list[str] = []
        for self.dialect in Dialect:
            try:
                await self._complete((0,), sampling, timeout_seconds=MEET_SECONDS)
                return
            except RequestRefused as err:
                refusals.append(str(err))
        raise RequestRefused(
            f"{self.address} can't continue a prompt of model {self._model!r}; it needs the "
            f"completions API: {refusals[-1]}"
        )

    async def generate(self, prompt_ids: tuple[int, ...], *, sampling: Sampling) -> Completion:
        return await self._complete(prompt_ids, sampling, timeout_seconds=self._request_seconds)

    def stream(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        """In the text dialect one chunk: parts of a text can't be tokenised one by one."""
        if self.dialect is Dialect.text:
            return as_one_chunk(self.generate(prompt_ids, sampling=sampling))
        return self._stream(prompt_ids, sampling)

    async def load(self, version: int, *, path: Path) -> None:  # noqa: ARG002
        raise LoadFailed(f"{self.address} is run by others; its weights are theirs to change")

    async def check(self) -> None:
        """Raises ServerGone when it doesn't answer; refusing to list models is an answer."""
        try:
            await self._channel.get("/models", timeout_seconds=MEET_SECONDS)
        except RequestRefused:
            return

    async def close(self) -> None:
        await self._channel.close()

    async def _names(self) -> list[str]:
        try:
            data = await self._channel.get("/models", timeout_seconds=MEET_SECONDS)
        except RequestRefused as err:
            if self._model is not None:
                return []
            raise RequestRefused(
                f"{err}; check the address (it ends with /v1) and the key in the variable that "
                "rollout.engine.key_variable names, or give rollout.engine.model=NAME"
            ) from err
        try:
            return [model.id for model in msgspec.json.decode(data, type=Models).data]
        except msgspec.DecodeError as err:
            raise ServerGone(f"{self.address}/models answered something else: {err}") from err

    async def _complete(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, *, timeout_seconds: float
    ) -> Completion:
        body = self._request(prompt_ids, sampling)
        data = await self._channel.post("/completions", body, timeout_seconds=timeout_seconds)
        choice = self._choice(data)
        if choice is None:
            raise ServerGone(f"{self.address} answered without a choice")
        if self.dialect is Dialect.tokens:
            ids, logprobs = self._tokens(choice)
        else:
            ids = self._encoded(choice, sampling)
            logprobs = (0.0,) * len(ids)
        return Completion(
            token_ids=ids,
            logprobs=logprobs,
            versions=(self._version,) * len(ids),
            finish_reason=_reason(choice.finish_reason) or finish_of(ids, sampling) or "abort",
        )

    async def _stream(
        self, prompt_ids: tuple[int, ...], sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        body = self._request(prompt_ids, sampling) | {"stream": True}
        events = self._channel.events("/completions", body, timeout_seconds=self._request_seconds)
        async with aclosing(events):
            async for data in events:
                choice = self._choice(data)
                if choice is None:
                    continue  # an event with the usage alone
                ids, logprobs = self._tokens(choice)
                yield Chunk(
                    token_ids=ids,
                    logprobs=logprobs,
                    versions=(self._version,) * len(ids),
                    finish_reason=_reason(choice.finish_reason),
                )

    def _request(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.seed is not None:
            # Some endpoints take 32 bits only.
            body["seed"] = sampling.seed % 2**31
        if self.dialect is Dialect.tokens:
            if sampling.top_k:
                body["top_k"] = sampling.top_k
            return body | {
                "prompt": list(prompt_ids),
                "logprobs": 1,
                "return_token_ids": True,
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": True,
                "skip_special_tokens": False,
            }
        if sampling.top_k:
            raise RequestRefused(
                f"top_k={sampling.top_k} can't be asked of {self.address}; leave it 0"
            )
        body["prompt"] = self._words.decode(prompt_ids)
        if stops := [self._words.decode([token]) for token in sampling.stop_token_ids]:
            body["stop"] = stops[:MAX_STOPS]
        return body

    def _choice(self, data: bytes) -> _Choice | None:
        try:
            answer = msgspec.json.decode(data, type=_Answer)
        except msgspec.DecodeError as err:
            raise ServerGone(f"{self.address} answered something else: {err}") from err
        if answer.error is not None:
            raise ServerGone(f"{self.address} failed a request: {answer.error}")
        return answer.choices[0] if answer.choices else None

    def _tokens(self, choice: _Choice) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Ids and log-probabilities. Raises RequestRefused where the endpoint gives no ids."""
        given = (choice.logprobs.token_logprobs if choice.logprobs else None) or []
        if choice.token_ids is None:
            if choice.finish_reason is not None and not choice.text and not given:
                return (), ()  # a bare end of a stream
            raise RequestRefused(f"{self.address} gives no token ids")
        if len(given) != len(choice.token_ids) or None in given:
            raise EngineError(
                f"{self.address} gave {len(choice.token_ids)} tokens and {len(given)} "
                "log-probabilities; they must belong together"
            )
        return tuple(choice.token_ids), tuple(float(value or 0.0) for value in given)

    def _encoded(self, choice: _Choice, sampling: Sampling) -> tuple[int, ...]:
        """The answer's text as ids; the stop token that ended it is put back."""
        ids = tuple(self._words.encode(choice.text))[: sampling.max_new_tokens]
        stopped = choice.finish_reason == "stop" and len(ids) < sampling.max_new_tokens
        if stopped and not set(ids[-1:]) & set(sampling.stop_token_ids):
            ids += sampling.stop_token_ids[:1]
        return ids


def _reason(said: str | None) -> str | None:
    return said if said in ("stop", "length", None) else "abort"
