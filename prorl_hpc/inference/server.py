"""One inference server as the pool sees it, and how vLLM's is spoken to. Knows no process.

generate:  POST /inference/v1/generate   token ids in; ids, log-probabilities, versions out
load:      pause (keep) -> start -> update (path) -> finish (version) -> resume
"""

import asyncio
from pathlib import Path
from typing import Protocol

import msgspec

from prorl_hpc.inference.engine import Completion, EngineError, Sampling
from prorl_hpc.inference.http import Channel, RequestRefused, ServerGone
from prorl_hpc.policy import PolicyError, verify_policy

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


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice]


class VllmServer:
    """vLLM's HTTP interface (0.32, 0.33), started with scale-out routes and our weight transfer."""

    def __init__(self, address: str, *, version: int, request_seconds: float = 1800.0) -> None:
        self._channel = Channel(address)
        self._version = version
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

    async def load(self, version: int, *, path: Path) -> None:
        """Moves to `version`; raises LoadFailed when the server can't be trusted any more."""
        async with self._loading:
            try:
                if not self._prepared:
                    await self.prepare()
                for route, body in (
                    ("/pause?mode=keep", None),
                    ("/start_weight_update", None),
                    ("/update_weights", {"update_info": {"path": str(path)}}),
                    ("/finish_weight_update", {"weight_version": str(version)}),
                    ("/resume", None),
                ):
                    await self._channel.post(route, body, timeout_seconds=UPDATE_SECONDS)
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

        class Model(msgspec.Struct):
            id: str

        class Models(msgspec.Struct):
            data: list[Model]

        data = await self._channel.get("/v1/models", timeout_seconds=HEALTH_SECONDS)
        try:
            return msgspec.json.decode(data, type=Models).data[0].id
        except (msgspec.DecodeError, IndexError) as err:
            raise ServerGone(f"{self.address} doesn't say which model it serves: {err}") from err

    async def close(self) -> None:
        await self._channel.close()


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
    try:
        choice = msgspec.json.decode(data, type=_Answer).choices[0]
    except (msgspec.DecodeError, IndexError) as err:
        raise ServerGone(f"{address} answered something else than a completion: {err}") from err
    ids = choice.token_ids or []
    content = (choice.logprobs.content if choice.logprobs else None) or []
    versions: list[int] = []
    for span in choice.weight_versions or []:
        if span.start != len(versions) or not span.version.lstrip("-").isdigit():
            raise ServerGone(f"{address} gives versions {choice.weight_versions} that have gaps")
        versions += [int(span.version)] * (span.end - span.start)
    if [token.token_id for token in content] != ids or len(versions) != len(ids):
        raise ServerGone(
            f"{address} gave {len(ids)} tokens, {len(content)} log-probabilities and "
            f"{len(versions)} versions; they must belong together"
        )
    reason = choice.finish_reason or "abort"
    return Completion(
        token_ids=tuple(ids),
        logprobs=tuple(token.logprob for token in content),
        versions=tuple(versions),
        finish_reason=reason if reason in ("stop", "length") else "abort",
    )


def check_version(path: Path, version: int) -> None:
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


def _check_header(path: Path) -> None:
    """A safetensors file says in its head how long it is: 8 bytes, then JSON with offsets."""
    with path.open("rb") as stream:
        head = stream.read(8)
        length = int.from_bytes(head, "little")
        size = path.stat().st_size
        try:
            if len(head) < 8 or length > size - 8:
                raise ValueError("its header is longer than the file")
            header = msgspec.json.decode(stream.read(length), type=dict[str, dict[str, object]])
            ends = [e["data_offsets"][1] for k, e in header.items() if k != "__metadata__"]  # type: ignore[index]
            if max(ends, default=0) != size - 8 - length:
                raise ValueError("its tensors don't fill the file")
        except (ValueError, KeyError, TypeError, IndexError, msgspec.DecodeError) as err:
            raise EngineError(f"{path} isn't a whole safetensors file: {err}") from err
