"""An inference server that speaks ProRL Agent Server's interface: `POST /generate` with ids.

Its answers carry no policy version: tokens are stamped with the one that the pool was told.
"""

from pathlib import Path

import msgspec

from prorl_hpc.inference.engine import Completion, Sampling
from prorl_hpc.inference.http import Channel, ServerGone
from prorl_hpc.inference.server import LoadFailed


class _Answer(msgspec.Struct, frozen=True):
    response_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None


class ProrlServer:
    """A server that others run; its weights are theirs to update."""

    def __init__(self, address: str, *, version: int, request_seconds: float = 1800.0) -> None:
        self._channel = Channel(address)
        self._version = version
        self._request_seconds = request_seconds

    @property
    def address(self) -> str:
        return self._channel.address

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, prompt_ids: tuple[int, ...], *, sampling: Sampling) -> Completion:
        data = await self._channel.post(
            "/generate",
            {
                "prompt_ids": prompt_ids,
                "sampling_params": {
                    "temperature": sampling.temperature,
                    "max_new_tokens": sampling.max_new_tokens,
                    "max_tokens": sampling.max_new_tokens,
                    "stop_token_ids": list(sampling.stop_token_ids),
                    "top_p": sampling.top_p,
                    "top_k": sampling.top_k or -1,
                    "seed": sampling.seed,
                },
            },
            timeout_seconds=self._request_seconds,
        )
        try:
            answer = msgspec.json.decode(data, type=_Answer)
        except msgspec.DecodeError as err:
            raise ServerGone(f"{self.address}/generate answered something else: {err}") from err
        ids = answer.response_ids
        if len(answer.logprobs) != len(ids):
            raise ServerGone(
                f"{self.address} gave {len(ids)} tokens and {len(answer.logprobs)} "
                "log-probabilities; training needs one for each"
            )
        stopped = bool(ids) and ids[-1] in sampling.stop_token_ids
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(answer.logprobs),
            versions=(self._version,) * len(ids),
            finish_reason="stop" if stopped or len(ids) < sampling.max_new_tokens else "length",
        )

    async def load(self, version: int, *, path: Path) -> None:  # noqa: ARG002
        raise LoadFailed(f"{self.address} loads its weights itself; add it again when it has")

    async def check(self) -> None:
        """Any answer will do: the interface has no health route."""
        from prorl_hpc.inference.http import RequestRefused

        try:
            await self._channel.get("/health", timeout_seconds=10.0)
        except RequestRefused:
            return

    async def close(self) -> None:
        await self._channel.close()
