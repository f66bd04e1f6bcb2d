"""One inference job as a rollout node sees it: a `Server` of the pool, by the gateway's messages.

It follows policy versions by itself, so that `load` only passes on which one is wanted.
"""

from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path

import msgspec

from prorl_hpc.inference.announce import Announcement
from prorl_hpc.inference.engine import Completion, Sampling
from prorl_hpc.inference.gateway import GenerateReply, GenerateRequest, HealthReply
from prorl_hpc.inference.http import Channel, RequestRefused, ServerGone

HEALTH_SECONDS = 10.0

conversation: ContextVar[str] = ContextVar("conversation", default="")
"""Affinity of the request under way: a job with several servers keeps it on one of them."""


class RemoteServer:
    """Speaks to the server of one announcement."""

    def __init__(
        self,
        announcement: Announcement,
        *,
        token: str,
        request_seconds: float,
        newest: Callable[[], int],
        heard: Callable[[str, int, int], None],
        drains: Callable[[str], None],
    ) -> None:
        """`newest` is the version that this node knows of; `heard` gets address, version and
        requests in flight with every answer, `drains` the address once it takes nothing more."""
        self.announcement = announcement
        self._channel = Channel(announcement.address, headers={"authorization": f"Bearer {token}"})
        self._request_seconds = request_seconds
        self._newest = newest
        self._heard = heard
        self._drains = drains
        self._version = announcement.version
        self.draining = False
        self.in_flight = 0
        """What it has to do, those of other nodes included, when it was last heard."""

    @property
    def address(self) -> str:
        return self._channel.address

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, prompt_ids: tuple[int, ...], *, sampling: Sampling) -> Completion:
        request = GenerateRequest(
            prompt_ids=list(prompt_ids),
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            policy_version=sampling.policy_version,
            newest=self._newest(),
            affinity=conversation.get(),
        )
        data = await self._channel.post(
            "/v1/generate",
            msgspec.to_builtins(request),
            timeout_seconds=self._request_seconds,
        )
        return self._read(data)

    async def load(self, version: int, *, path: Path) -> None:
        """Nothing to do: the server follows published versions itself."""

    async def check(self) -> None:
        """Raises ServerGone when it isn't well, isn't the one announced, or refuses our token."""
        try:
            data = await self._channel.get("/v1/health", timeout_seconds=HEALTH_SECONDS)
            reply = msgspec.json.decode(data, type=HealthReply)
        except (RequestRefused, msgspec.DecodeError) as err:
            raise ServerGone(f"{self.address} is somebody else's server: {err}") from err
        if reply.identity != self.announcement.identity:
            raise ServerGone(f"{self.address} is somebody else's server ({reply.identity})")
        self._note(reply.version, reply.in_flight)
        self.draining = reply.draining
        if reply.draining:
            self._drains(self.address)

    async def close(self) -> None:
        await self._channel.close()

    def _read(self, data: bytes) -> Completion:
        try:
            reply = msgspec.json.decode(data, type=GenerateReply)
        except msgspec.DecodeError as err:
            raise ServerGone(f"{self.address} answered something else: {err}") from err
        lengths = {len(reply.token_ids), len(reply.logprobs), len(reply.versions)}
        if len(lengths) > 1:
            raise ServerGone(f"{self.address} gave tokens, log-probabilities and versions that "
                             f"don't belong together: {sorted(lengths)} of them")  # fmt: skip
        self._note(reply.version, reply.in_flight)
        return Completion(
            token_ids=tuple(reply.token_ids),
            logprobs=tuple(reply.logprobs),
            versions=tuple(reply.versions),
            finish_reason=reply.finish_reason,
        )

    def _note(self, version: int, in_flight: int) -> None:
        self._version, self.in_flight = version, in_flight
        self._heard(self.address, version, in_flight)
