"""Inference jobs inside the test's own event loop: a scripted engine behind the real gateway."""

import asyncio
import random
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from prorl_hpc.inference.announce import Announcement, announce, load_token, make_token
from prorl_hpc.inference.engine import Chunk, Completion, EngineError, Sampling, as_one_chunk
from prorl_hpc.inference.gateway import Gateway
from prorl_hpc.policy import digest_at
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.run import Run
from prorl_hpc.service.gate import Gate

BOUND_SECONDS = 120.0


class EchoEngine:
    """Says its own number once per token; holds, fails or hangs when told to. A real fake."""

    def __init__(self, number: int = 7, *, version: int = 0) -> None:
        self.number = number
        self.version = version
        self.hold = asyncio.Event()
        self.hold.set()
        self.error = ""
        self.num_failures = 10**9
        """How many requests `error` still strikes."""
        self.load_error = ""
        self.running = 0
        self.num_requests = 0
        self.cancelled = 0
        self.loads: list[int] = []
        self.last: tuple[tuple[int, ...], Sampling, str] | None = None

    async def start(self) -> None:
        """Nothing to load."""

    async def generate(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> Completion:
        self.num_requests += 1
        self.last = (prompt_ids, sampling, affinity)
        self.running += 1
        try:
            await self.hold.wait()
            if self.error and self.num_failures > 0:
                self.num_failures -= 1
                raise EngineError(self.error)
            n = sampling.max_new_tokens
            return Completion(
                token_ids=(self.number,) * n,
                logprobs=(-0.1,) * n,
                versions=(self.version,) * n,
                finish_reason="length",
            )
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def stream(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        return as_one_chunk(self.generate(prompt_ids, sampling=sampling, affinity=affinity))

    async def load(self, version: int, *, path: Path) -> None:
        if self.load_error:
            raise EngineError(self.load_error)
        self.version = version
        self.loads.append(version)

    async def close(self) -> None:
        """Nothing to free."""


class HttpJob:
    """One inference job: engine, gateway, HTTP server and announcement."""

    def __init__(self, run: Run, *, index: int = 0, engine: EchoEngine | None = None) -> None:
        make_token(run)
        self.run = run
        self.index = index
        self.engine = engine or EchoEngine()
        digest = digest_at(run.policy(self.engine.version))
        self.versions = Versions(
            self.engine, run=run, digest=digest, publish_seconds=0.1, look_seconds=0.0
        )
        self.gateway = Gateway(
            self.engine,
            self.versions,
            identity=f"job-{index}-{random.getrandbits(32):08x}",
            hang_seconds=600.0,
            hint=self.versions.offer,
            is_gone=lambda v: v < self.engine.version and not run.policy(v).is_dir(),
        )
        self.port = 0
        self._server: Any = None
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self, *, attempt: int = 1, announced: bool = True) -> "HttpJob":
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        self.port = listener.getsockname()[1]
        app = Gate(self.gateway, token=load_token(self.run), max_body_bytes=100_000)
        config = uvicorn.Config(app, log_level="critical", lifespan="off", ws="none",
                                timeout_graceful_shutdown=0)  # fmt: skip
        self._server = _Server(config)
        self._tasks = [
            asyncio.create_task(self._server.serve(sockets=[listener])),
            asyncio.create_task(self.versions.follow()),
        ]
        if announced:
            self.announce(attempt=attempt)
        return self

    def announcement(self, *, attempt: int = 1, beat: int = 1) -> Announcement:
        return Announcement(
            run=self.run.name, index=self.index, attempt=attempt, host="127.0.0.1", port=self.port,
            identity=self.gateway.identity, beat=beat, version=self.engine.version, in_flight=0,
        )  # fmt: skip

    def announce(self, *, attempt: int = 1, beat: int = 1) -> None:
        assert announce(self.run, self.announcement(attempt=attempt, beat=beat))

    async def kill(self) -> None:
        """Gone without a word: connections break, the announcement stays."""
        self._server.should_exit = self._server.force_exit = True
        self._tasks[1].cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.gateway.close()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def jobs(*made: HttpJob) -> AsyncIterator[None]:
    """Started on entry, killed at the end (twice does no harm)."""
    for job in made:
        await job.start()
    try:
        yield
    finally:
        for job in made:
            await job.kill()


def bounded(test: Any) -> None:
    """Runs a coroutine to its end, within a generous bound."""

    async def run() -> None:
        async with asyncio.timeout(BOUND_SECONDS):
            await test

    asyncio.run(run())


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)
