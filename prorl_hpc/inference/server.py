"""One inference server as the pool sees it, and how vLLM's is spoken to. Knows no process.

generate:  POST /inference/v1/generate   token ids in; ids, log-probabilities, versions out
stream:    the same as events; only the last one says which tokens which version made
load:      pause (keep) -> start -> update (path) -> finish (version) -> resume
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from prorl_hpc.inference.engine import Chunk, Completion, EngineError, Sampling
from prorl_hpc.inference.http import Channel, RequestRefused, ServerGone
from prorl_hpc.policy import PolicyError, PolicyManifest, verify_policy

HEALTH_SECONDS = 10.0
UPDATE_SECONDS = 600.0
"""Longest time for one step of a weight update (reading a large model from a busy file system)."""


class LoadFailed(EngineError):
    """A weight update broke off: the server is in no known state and must be replaced."""


class Server(Protocol):
    """One server of a pool."""

    @property
    def address(self) -> str:
        """Its name in the pool."""

    @property
    def version(self) -> int:
        """Policy version that it samples from."""

    async def generate(self, prompt_ids: tuple[int, ...], *, sampling: Sampling) -> Completion:
        """Raises ServerGone or RequestRefused."""

    async def load(self, version: int, *, path: Path) -> None:
        """Moves to a version in flight, whose directory was checked. Raises LoadFailed."""

    async def check(self) -> None:
        """Raises ServerGone when it isn't well."""

    async def close(self) -> None:
        """Closes connections; the server goes on."""


@runtime_checkable
class StreamingServer(Protocol):
    """A server that can also answer token by token; others give their answer as one chunk."""

    def stream(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        """Raises ServerGone or RequestRefused; closing it early cancels the request."""


class _Span(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class _Token(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_Token] | None = None


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Failure(msgspec.Struct, frozen=True):
    message: str = ""


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    error: _Failure | None = None


class VllmServer:
    """vLLM's HTTP interface (0.32, 0.33), started with scale-out routes and our weight transfer."""

    def __init__(self, address: str, *, version: int, request_seconds: float = 1800.0) -> None:
        self._channel = Channel(address)
        self._version = version
        self._stamp = version
        """What a stream's tokens are stamped with; checked against the server's own account."""
        self._request_seconds = request_seconds
        self._loading = asyncio.Lock()
        self._prepared = False

    @property
    def address(self) -> str:
        return self._channel.address

    @property
    def version(self) -> int:
        return self._version

    async def prepare(self) -> None:
        """Once per server process: version stamps and weight transfer. Raises EngineError."""
        stamp = {"new_version": str(self._version)}
        await self._channel.post("/update_weight_version", stamp, timeout_seconds=HEALTH_SECONDS)
        await self._channel.post(
            "/init_weight_transfer_engine", {"init_info": {}}, timeout_seconds=UPDATE_SECONDS
        )
        self._prepared = True

    async def generate(self, prompt_ids: tuple[int, ...], *, sampling: Sampling) -> Completion:
        data = await self._channel.post(
            "/inference/v1/generate",
            {"token_ids": prompt_ids, "sampling_params": sampling_parameters(sampling)},
            timeout_seconds=self._request_seconds,
        )
        return read_completion(data, address=self.address)

    async def stream(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        """Raises EngineError at the end if a token's stamp isn't the version that made it."""
        body = {
            "token_ids": prompt_ids,
            "sampling_params": sampling_parameters(sampling),
            "stream": True,
        }
        given: list[int] = []
        events = self._channel.events(
            "/inference/v1/generate", body, timeout_seconds=self._request_seconds
        )
        async with aclosing(events):
            async for data in events:
                choice = _choice(data, address=self.address)
                ids, logprobs = _tokens(choice, address=self.address)
                given += [self._stamp] * len(ids)
                if choice.finish_reason is not None:
                    made = _versions(choice.weight_versions, address=self.address)
                    if made != given:
                        raise EngineError(
                            f"{self.address} was updated while it streamed, and tokens went out "
                            f"as versions {sorted(set(given))} that {sorted(set(made))} made"
                        )
                yield Chunk(
                    token_ids=ids,
                    logprobs=logprobs,
                    versions=tuple(given[len(given) - len(ids) :]),
                    finish_reason=_reason(choice.finish_reason),
                )

    async def load(self, version: int, *, path: Path) -> None:
        """Moves to `version`; raises LoadFailed when the server can't be trusted any more."""
        async with self._loading:
            try:
                if not self._prepared:
                    await self.prepare()
                for route, body in (
                    # Keeps requests and drops every cached prefix: they are computed again.
                    ("/pause?mode=keep", None),
                    ("/start_weight_update", None),
                    ("/update_weights", {"update_info": {"path": str(path)}}),
                    ("/finish_weight_update", {"weight_version": str(version)}),
                ):
                    await self._channel.post(route, body, timeout_seconds=UPDATE_SECONDS)
                # Before the next token can be made, and long after the last one was.
                self._stamp = version
                await self._channel.post("/resume", timeout_seconds=UPDATE_SECONDS)
            except EngineError as err:
                raise LoadFailed(f"{self.address} can't load version {version}: {err}") from err
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
        await self._channel.close()


class _Model(msgspec.Struct, frozen=True):
    id: str


class Models(msgspec.Struct, frozen=True):
    """What `/v1/models` says."""

    data: list[_Model]


async def first_model(channel: Channel) -> str:
    """Name of the first model behind an address. Raises ServerGone, RequestRefused."""
    data = await channel.get("/v1/models", timeout_seconds=HEALTH_SECONDS)
    try:
        return msgspec.json.decode(data, type=Models).data[0].id
    except (msgspec.DecodeError, IndexError) as err:
        raise ServerGone(f"{channel.address} doesn't say which model it serves: {err}") from err


def sampling_parameters(sampling: Sampling) -> dict[str, object]:
    """vLLM's form of a request. Only our own stop tokens end a completion."""
    return {
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": sampling.seed,
        "logprobs": 0,
        "detokenize": False,
    }


def read_completion(data: bytes, *, address: str) -> Completion:
    """Decodes an answer; raises ServerGone when ids, log-probabilities and versions don't match."""
    choice = _choice(data, address=address)
    ids, logprobs = _tokens(choice, address=address)
    versions = _versions(choice.weight_versions, address=address)
    if len(versions) != len(ids):
        raise ServerGone(f"{address} gave {len(ids)} tokens and {len(versions)} versions")
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        versions=tuple(versions),
        finish_reason=_reason(choice.finish_reason) or "abort",
    )


def _choice(data: bytes, *, address: str) -> _Choice:
    try:
        answer = msgspec.json.decode(data, type=_Answer)
        if answer.error is not None:
            raise ServerGone(f"{address} failed a request: {answer.error.message}")
        return answer.choices[0]
    except (msgspec.DecodeError, IndexError) as err:
        raise ServerGone(f"{address} answered something else than a completion: {err}") from err


def _tokens(choice: _Choice, *, address: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Token ids and the log-probability of each."""
    ids = choice.token_ids or []
    content = (choice.logprobs.content if choice.logprobs else None) or []
    if [token.token_id for token in content] != ids:
        raise ServerGone(
            f"{address} gave {len(ids)} tokens and {len(content)} log-probabilities; they must "
            "belong together"
        )
    return tuple(ids), tuple(token.logprob for token in content)


def _versions(spans: list[_Span] | None, *, address: str) -> list[int]:
    """The version of each token, from the spans that the server tells at the end."""
    versions: list[int] = []
    for span in spans or []:
        if span.start != len(versions) or not span.version.lstrip("-").isdigit():
            raise ServerGone(f"{address} gives versions {spans} that have gaps")
        versions += [int(span.version)] * (span.end - span.start)
    return versions


def _reason(said: str | None) -> str | None:
    return said if said in ("stop", "length", None) else "abort"


def check_version(path: Path, version: int) -> PolicyManifest:
    """Raises EngineError unless `path` holds `version`, whole, in readable safetensors files."""
    try:
        manifest = verify_policy(path)
    except PolicyError as err:
        raise EngineError(f"version {version} is refused: {err}") from err
    if manifest.version != version:
        raise EngineError(f"{path} holds version {manifest.version}, not {version}")
    files = [name for name in manifest.files if name.endswith(".safetensors")]
    if not files:
        raise EngineError(f"version {version} in {path} has no safetensors file")
    for name in files:
        _check_header(path / name)
    return manifest


def _check_header(path: Path) -> None:
    """A safetensors file says in its head how long it is: 8 bytes, then JSON with offsets."""
    try:
        with path.open("rb") as stream:
            head = stream.read(8)
            length = int.from_bytes(head, "little")
            size = path.stat().st_size
            if len(head) < 8 or length > size - 8:
                raise ValueError("its header is longer than the file")
            header = msgspec.json.decode(stream.read(length), type=dict[str, dict[str, object]])
        ends = [e["data_offsets"][1] for k, e in header.items() if k != "__metadata__"]  # type: ignore[index]
        if max(ends, default=0) != size - 8 - length:
            raise ValueError("its tensors don't fill the file")
    except OSError as err:  # the version may be removed at any time
        raise EngineError(f"{path} can't be read: {err.strerror}") from err
    except (ValueError, KeyError, TypeError, IndexError, msgspec.DecodeError) as err:
        raise EngineError(f"{path} isn't a whole safetensors file: {err}") from err
