"""The HTTP face of one inference job: an ASGI application over any engine.

    POST /v1/generate   token ids in; ids, log-probabilities and versions out
    GET  /v1/health     200 with the load while it is well, 503 with the reason while it isn't

A request that is bound to a policy version waits until the engine holds it (`rollout.versions`). A
client that goes away cancels its request. Knows no process, no file and no token of the run.
"""

import asyncio
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import msgspec

from prorl_hpc.inference.engine import Completion, Engine, EngineError, Sampling
from prorl_hpc.inference.http import RequestRefused
from prorl_hpc.rollout.versions import Versions

MAX_BODY_BYTES = 64 << 20
PROBE_SECONDS = 120.0
"""An engine that failed a request must answer one of a single token within this."""

PROBE_PAUSES_SECONDS = (0.0, 1.0, 4.0)
"""Before each of the probes that it is given."""

Scope = MutableMapping[str, Any]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as a rollout node sends it."""

    prompt_ids: list[int]
    temperature: float
    max_new_tokens: int
    stop_token_ids: list[int] = []
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    policy_version: int | None = None
    newest: int = -1
    """Newest version that the sender knows of."""
    affinity: str = ""

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            policy_version=self.policy_version,
        )


class GenerateReply(msgspec.Struct, frozen=True, kw_only=True):
    """What came out, and what else the server is busy with."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    version: int
    in_flight: int


class HealthReply(msgspec.Struct, frozen=True, kw_only=True):
    """A server that is well."""

    identity: str
    version: int
    in_flight: int
    draining: bool


class Gateway:
    """Serves one engine until told to drain; notices when the engine is dead."""

    def __init__(
        self,
        engine: Engine,
        versions: Versions,
        *,
        identity: str,
        hang_seconds: float,
        is_ready: Callable[[], bool] = lambda: True,
        hint: Callable[[int], None] = lambda _: None,
        is_gone: Callable[[int], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hang_seconds` without any answer while requests wait mean that the engine hangs; `hint`
        hears which version a sender knows of; `is_gone` tells whether one can't be had any more.
        """
        self._engine = engine
        self._versions = versions
        self.identity = identity
        self._hang_seconds = hang_seconds
        self._is_ready = is_ready
        self._hint = hint
        self._is_gone = is_gone
        self._clock = clock
        self._moved = clock()
        self._probe: asyncio.Task[None] | None = None
        self._suspicion = ""
        self.draining = False
        self.dead = ""
        """Why the engine can't be used any more; empty while it can."""
        self.in_flight = 0
        self.num_completed = 0
        self.num_failed = 0
        self.num_tokens = 0

    @property
    def trouble(self) -> str:
        """Why nothing should be sent here; empty while all is well."""
        if self.dead or self._suspicion:
            return self.dead or self._suspicion
        if self.in_flight and self._clock() - self._moved > self._hang_seconds:
            self.dead = f"the engine answered nothing for {self._hang_seconds:g} s"
            return self.dead
        return "" if self._is_ready() else "none of the node's servers is up"

    async def close(self) -> None:
        """Gives up a probe that is under way."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        route = (scope["method"], scope["path"])
        if route == ("GET", "/v1/health"):
            await self._health(send)
        elif route == ("POST", "/v1/generate"):
            await self._generate(receive, send)
        else:
            await _answer(send, 404, _detail(f"there is no {route[0]} {route[1]}"))

    async def _health(self, send: Any) -> None:
        if trouble := self.trouble:
            await _answer(send, 503, _detail(trouble))
            return
        reply = HealthReply(
            identity=self.identity,
            version=self._engine.version,
            in_flight=self.in_flight,
            draining=self.draining,
        )
        await _answer(send, 200, msgspec.json.encode(reply))

    async def _generate(self, receive: Any, send: Any) -> None:
        message = await receive()
        try:
            request = msgspec.json.decode(message.get("body", b""), type=GenerateRequest)
        except msgspec.DecodeError as err:
            await _answer(send, 400, _detail(f"this isn't a request: {err}"))
            return
        if self.draining or self.dead:
            await _answer(send, 503, _detail(self.dead or "draining"))
            return
        self._hint(request.newest)
        work = asyncio.create_task(self._work(request))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return
            status, body = work.result()
            await _answer(send, status, body)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _work(self, request: GenerateRequest) -> tuple[int, bytes]:
        """Status and body of the answer."""
        version = request.policy_version
        if version is not None and self._is_gone(version):
            return 409, _detail(f"policy version {version} was removed")
        if self.in_flight == 0:
            self._moved = self._clock()
        self.in_flight += 1
        self._versions.bind(version)
        try:
            async with self._versions.held(version):
                completion = await self._ask(request)
        except RequestRefused as err:
            return 422, _detail(str(err))
        except EngineError as err:  # a version that can't be had says nothing against the engine
            self.num_failed += 1
            return 500, _detail(str(err))
        finally:
            self._versions.unbind(version)
            self.in_flight -= 1
        self.num_completed += 1
        self.num_tokens += len(completion.token_ids)
        return 200, self._reply(completion)

    async def _ask(self, request: GenerateRequest) -> Completion:
        """The engine's answer, whatever it is, is its sign of life; a client's leaving is none."""
        try:
            completion = await self._engine.generate(
                tuple(request.prompt_ids), sampling=request.sampling(), affinity=request.affinity
            )
        except EngineError as err:
            self._moved = self._clock()
            if not isinstance(err, RequestRefused):
                self._doubt(str(err))
            raise
        self._moved = self._clock()
        return completion

    def _reply(self, completion: Completion) -> bytes:
        return msgspec.json.encode(
            GenerateReply(
                token_ids=list(completion.token_ids),
                logprobs=list(completion.logprobs),
                versions=list(completion.versions),
                finish_reason=completion.finish_reason,
                version=self._engine.version,
                in_flight=self.in_flight,
            )
        )

    def _doubt(self, reason: str) -> None:
        """A request failed: the engine is out until it has shown that it still works."""
        if self._probe is None or self._probe.done():
            self._suspicion = f"the engine failed: {reason}"
            self._probe = asyncio.create_task(self._probe_engine(reason))

    async def _probe_engine(self, reason: str) -> None:
        sampling = Sampling(temperature=1.0, max_new_tokens=1)
        words = ""
        for seconds in PROBE_PAUSES_SECONDS:
            await asyncio.sleep(seconds)
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    await self._engine.generate((0,), sampling=sampling)
            except (EngineError, TimeoutError) as err:
                words = str(err) or f"it gave no token within {PROBE_SECONDS:g} s"
            else:
                self._suspicion = ""
                return
        self.dead = f"the engine is dead: {reason}; asked again: {words}"


async def _until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _detail(text: str) -> bytes:
    return msgspec.json.encode({"detail": text})


async def _answer(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
