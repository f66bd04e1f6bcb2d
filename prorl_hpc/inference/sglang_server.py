"""How an SGLang server is spoken to: its native interface. Knows no process and no pool.

generate:  POST /generate             token ids in; ids, log-probabilities and the version out
load:      pause (abort) -> update_weights_from_disk -> flush_cache -> continue

A pause ends every request with what it has; we ask again for the rest, after the update. So each
answer was made by one version, which the server names in it, and no key computed by old weights
outlives them.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import msgspec

from prorl_hpc.inference.engine import (
    Chunk,
    Completion,
    EngineError,
    Sampling,
    continued,
    finish_of,
)
from prorl_hpc.inference.http import Channel, RequestRefused, ServerGone
from prorl_hpc.inference.server import (
    HEALTH_SECONDS,
    UPDATE_SECONDS,
    LoadFailed,
    first_model,
)


class _Finish(msgspec.Struct, frozen=True):
    type: str
    message: str = ""


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: _Finish | None = None
    weight_version: str = ""
    completion_tokens: int | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []


class _Failure(msgspec.Struct, frozen=True):
    message: str = ""


class _Answer(msgspec.Struct, frozen=True):
    meta_info: _Meta = _Meta()
    error: _Failure | None = None


class _Result(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""


class SglangServer:
    """SGLang's HTTP interface (0.5)."""

    def __init__(self, address: str, *, version: int, request_seconds: float = 1800.0) -> None:
        self._channel = Channel(address)
        self._version = version
        self._request_seconds = request_seconds
        self._loading = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._num_loads = 0
        self._background: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return self._channel.address

    @property
    def version(self) -> int:
        return self._version

    async def prepare(self) -> None:
        """Once per server process: its answers name our version from now on. Raises EngineError."""
        body = {"new_version": str(self._version), "abort_all_requests": False}
        await self._told("/update_weight_version", body, timeout_seconds=HEALTH_SECONDS)

    async def generate(self, prompt_ids: tuple[int, ...], *, sampling: Sampling) -> Completion:
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        reason: str | None = None
        while reason is None:
            await self._open.wait()
            loads = self._num_loads
            body = _request((*prompt_ids, *ids), continued(sampling, num_made=len(ids)))
            try:
                data = await self._channel.post(
                    "/generate", body, timeout_seconds=self._request_seconds
                )
            except (asyncio.CancelledError, ServerGone):  # nobody waits any more, or not so long
                self._abort(str(body["rid"]))
                raise
            chunk = self._read(data, num_known=0)
            ids += chunk.token_ids
            logprobs += chunk.logprobs
            versions += chunk.versions
            reason = self._end_of(chunk, loads=loads, made=ids, sampling=sampling)
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            finish_reason=reason,
        )

    async def stream(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        made: list[int] = []
        reason: str | None = None
        while reason is None:
            await self._open.wait()
            loads = self._num_loads
            rest = continued(sampling, num_made=len(made))
            async with aclosing(self._segment((*prompt_ids, *made), rest)) as segment:
                async for chunk in segment:
                    made += chunk.token_ids
                    if chunk.finish_reason is not None:
                        reason = self._end_of(chunk, loads=loads, made=made, sampling=sampling)
                    if chunk.token_ids or reason is not None:
                        yield _ended(chunk, reason)

    async def load(self, version: int, *, path: Path) -> None:
        """Moves to `version`; raises LoadFailed when the server can't be trusted any more."""
        async with self._loading:
            self._open.clear()
            self._num_loads += 1
            update = {
                "model_path": str(path),
                "weight_version": str(version),
                "abort_all_requests": True,
                "flush_cache": True,
            }
            try:
                await self._post("/pause_generation", {"mode": "abort"})
                await self._told(
                    "/update_weights_from_disk", update, timeout_seconds=UPDATE_SECONDS
                )
                # Older releases don't know the flag; a cache that can't be flushed is an error.
                await self._post("/flush_cache", None)
                await self._post("/continue_generation", {})
            except EngineError as err:
                raise LoadFailed(f"{self.address} can't load version {version}: {err}") from err
            finally:
                self._open.set()
            self._version = version

    async def check(self) -> None:
        try:
            await self._channel.get("/health", timeout_seconds=HEALTH_SECONDS)
        except RequestRefused as err:
            raise ServerGone(str(err)) from err

    async def identity(self) -> str:
        """Name of the first model that the server serves. Raises EngineError."""
        return await first_model(self._channel)

    async def close(self) -> None:
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._channel.close()

    async def _segment(
        self, prompt_ids: tuple[int, ...], sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        """One request's events as chunks; a request that isn't read to its end is aborted."""
        body = _request(prompt_ids, sampling) | {"stream": True}
        num_known = 0
        ended = False
        events = self._channel.events("/generate", body, timeout_seconds=self._request_seconds)
        try:
            async with aclosing(events):
                async for data in events:
                    chunk = self._read(data, num_known=num_known)
                    num_known += len(chunk.token_ids)
                    ended = chunk.finish_reason is not None
                    yield chunk
        finally:
            if not ended:
                self._abort(str(body["rid"]))

    def _read(self, data: bytes, *, num_known: int) -> Chunk:
        """What is new in an answer; its events hold all tokens so far, or the new ones alone."""
        try:
            answer = msgspec.json.decode(data, type=_Answer)
        except msgspec.DecodeError as err:
            raise ServerGone(f"{self.address}/generate answered something else: {err}") from err
        if answer.error is not None:
            raise ServerGone(f"{self.address} failed a request: {answer.error.message}")
        meta = answer.meta_info
        total = meta.completion_tokens
        tokens = meta.output_token_logprobs
        if total is None or len(tokens) == total:
            tokens = tokens[num_known:]
        elif num_known + len(tokens) != total:
            raise ServerGone(
                f"{self.address} tells of {total} tokens and gave log-probabilities of "
                f"{num_known + len(tokens)}; training needs one for each"
            )
        if tokens and not meta.weight_version.isdigit():
            raise ServerGone(f"{self.address} says version {meta.weight_version!r}, not ours")
        if any(logprob is None for logprob, _, _ in tokens):
            raise ServerGone(f"{self.address} gave a token without a log-probability")
        return Chunk(
            token_ids=tuple(token for _, token, _ in tokens),
            logprobs=tuple(float(logprob or 0.0) for logprob, _, _ in tokens),
            versions=(int(meta.weight_version or 0),) * len(tokens),
            finish_reason=meta.finish_reason.type if meta.finish_reason else None,
        )

    def _end_of(
        self, chunk: Chunk, *, loads: int, made: list[int], sampling: Sampling
    ) -> str | None:
        """Why the whole answer is over; None if an update ended this part of it only."""
        if chunk.finish_reason in ("stop", "length"):
            return chunk.finish_reason
        if self._num_loads == loads:
            return "abort"
        return finish_of(made, sampling)

    def _abort(self, rid: str) -> None:
        """Ends a request that nobody waits for; the server notices a closed connection late."""

        async def tell() -> None:
            try:
                await self._channel.post(
                    "/abort_request", {"rid": rid}, timeout_seconds=HEALTH_SECONDS
                )
            except EngineError:
                return  # it is gone, and the request with it

        task = asyncio.get_running_loop().create_task(tell())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _post(self, path: str, body: object) -> None:
        await self._channel.post(path, body, timeout_seconds=UPDATE_SECONDS)

    async def _told(self, path: str, body: object, *, timeout_seconds: float) -> None:
        """A request whose answer says whether it worked. Raises EngineError."""
        data = await self._channel.post(path, body, timeout_seconds=timeout_seconds)
        try:
            result = msgspec.json.decode(data, type=_Result)
        except msgspec.DecodeError as err:
            raise ServerGone(f"{self.address}{path} answered something else: {err}") from err
        if not result.success:
            raise ServerGone(f"{self.address}{path} failed: {result.message}")


def sampling_parameters(sampling: Sampling) -> dict[str, object]:
    """SGLang's form of a request. Only our own stop tokens end a completion, and stay in it."""
    parameters: dict[str, object] = {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    return parameters


def _request(prompt_ids: tuple[int, ...], sampling: Sampling) -> dict[str, object]:
    return {
        "rid": f"prorl-{secrets.token_hex(12)}",
        "input_ids": list(prompt_ids),
        "sampling_params": sampling_parameters(sampling),
        "return_logprob": True,
    }


def _ended(chunk: Chunk, reason: str | None) -> Chunk:
    """The chunk with the end of the whole answer instead of its part's."""
    return Chunk(
        token_ids=chunk.token_ids,
        logprobs=chunk.logprobs,
        versions=chunk.versions,
        finish_reason=reason,
    )
