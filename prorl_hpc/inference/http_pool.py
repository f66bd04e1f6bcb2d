"""Several inference servers behind one engine: balance, retry, drain, follow versions.

    generate --> balancer --> server A | server B | ...     lost servers: try elsewhere, drained
    stream   --> the same; what has come already stays, another server continues after it
    load     --> all servers at once; one that fails is dropped and replaced, never left behind

Servers may join and leave at any time. Knows no process: a supervisor starts servers, calls
`join`, and learns through `lost` which to replace.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from prorl_hpc.inference.balancer import FIRST_WINDOW, Balancer, Ticket
from prorl_hpc.inference.engine import (
    Chunk,
    Completion,
    EngineError,
    Sampling,
    as_one_chunk,
    continued,
    finish_of,
)
from prorl_hpc.inference.http import ServerGone
from prorl_hpc.inference.server import Server, StreamingServer, check_version

log = logging.getLogger("prorl_hpc.inference")

HEALTH_EVERY_SECONDS = 5.0
MAX_MISSED_CHECKS = 3
"""So many looks in a row without an answer, and the server is given up with what it works on."""

MAX_ATTEMPTS = 8
"""Servers that one request may lose before it fails."""


class HttpPool:
    """An engine over servers that come and go. One event loop."""

    def __init__(
        self,
        servers: Sequence[Server] = (),
        *,
        version: int,
        path: Path | None = None,
        patience_seconds: float = 600.0,
        health_every_seconds: float = HEALTH_EVERY_SECONDS,
        lost: Callable[[Server], None] = lambda _: None,
        expected_tokens: float = 256.0,
        first_window: int = FIRST_WINDOW,
    ) -> None:
        """`path` holds `version`. Requests wait `patience_seconds` for a server when none is well;
        `lost` hears of each server that must be replaced."""
        self._first = tuple(servers)
        self._version = version
        self._path = path
        self._digest = ""
        """Of the manifest of `version`, once a load has checked it."""
        self._patience_seconds = patience_seconds
        self._health_every_seconds = health_every_seconds
        self._lost = lost
        self._balancer = Balancer(expected_tokens=expected_tokens, first_window=first_window)
        self._servers: dict[str, Server] = {}
        self._running: defaultdict[str, set[asyncio.Future[Any]]] = defaultdict(set)
        self._missed: defaultdict[str, int] = defaultdict(int)
        self._retired: set[str] = set()
        self._changed = asyncio.Condition()
        self._loading = asyncio.Lock()
        self._closed = False
        self._background: set[asyncio.Task[None]] = set()
        self.num_retries = 0
        """Requests that were sent again because their server was lost (infrastructure retries)."""
        self.num_lost = 0
        """Servers that were lost."""

    @property
    def version(self) -> int:
        return self._version

    @property
    def path(self) -> Path | None:
        """Directory of `version`."""
        return self._path

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses that take requests."""
        return self._balancer.servers

    async def start(self) -> None:
        """Takes in the given servers; raises EngineError when one can't be reached."""
        for server in self._first:
            await server.check()
            await self.join(server)
        self._spawn(self._watch_forever())

    async def join(self, server: Server, *, digest: str = "") -> None:
        """Takes a server in, moved to the pool's version first. Raises EngineError.

        `digest`: of the manifest that it was started from, where that is known. The same number
        with another digest was published again meanwhile, and is loaded too.
        """
        async with self._loading:
            if self._closed:
                raise EngineError("the engine is closed")
            same = server.version == self._version and digest in ("", self._digest or digest)
            if not same and self._path is not None:
                await server.load(self._version, path=self._path)
            async with self._changed:
                self._servers[server.address] = server
                self._balancer.join(server.address)
                self._changed.notify_all()

    async def leave(self, address: str) -> None:
        """Takes a server out; what it works on is tried elsewhere."""
        server = self._servers.get(address)
        if server is not None:
            self._drop(server)

    def retire(self, address: str) -> None:
        """Gives a server nothing more; it is dropped once what it works on has ended."""
        if address in self._servers:
            self._balancer.drain(address)
            self._retired.add(address)
            self._drop_retired(address)

    def observe(self, address: str, *, num_requests: int) -> None:
        """A server that others use too said how many requests it has."""
        self._balancer.observe(address, num_requests=num_requests)

    async def generate(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> Completion:
        """Raises RequestRefused for what no server takes, EngineError when no server is left."""
        failed: dict[str, str] = {}
        for attempt in range(MAX_ATTEMPTS):
            ticket = await self._place(affinity, len(prompt_ids), failed)
            self.num_retries += attempt > 0
            server = self._servers[ticket.server]
            completion = None
            try:
                completion = await self._ask(server, prompt_ids, sampling)
                return completion
            except ServerGone as err:
                failed[server.address] = str(err)
                await self._doubt(server, str(err))
            finally:
                num_tokens = len(completion.token_ids) if completion else None
                self._balancer.done(ticket, num_tokens=num_tokens)
                self._drop_retired(ticket.server)
        raise EngineError(
            f"a request failed on {MAX_ATTEMPTS} servers; the last: {list(failed.values())[-1]}"
        )

    async def stream(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        """The same token by token; raises as `generate` does."""
        failed: dict[str, str] = {}
        made: list[int] = []
        for attempt in range(MAX_ATTEMPTS):
            known = (*prompt_ids, *made)
            ticket = await self._place(affinity, len(known), failed)
            self.num_retries += attempt > 0
            server = self._servers[ticket.server]
            ended = False
            try:
                rest = continued(sampling, num_made=len(made))
                async with aclosing(self._pump(server, known, rest)) as chunks:
                    async for chunk in chunks:
                        made += chunk.token_ids
                        ended = chunk.finish_reason is not None
                        yield chunk
                if ended:
                    return
            except ServerGone as err:
                failed[server.address] = str(err)
                await self._doubt(server, str(err))
            finally:
                self._balancer.done(ticket, num_tokens=len(made) if ended else None)
                self._drop_retired(ticket.server)
            if reason := finish_of(made, sampling):
                # Only the word that it was over got lost.
                yield Chunk(token_ids=(), logprobs=(), versions=(), finish_reason=reason)
                return
        raise EngineError(
            f"a request failed on {MAX_ATTEMPTS} servers; the last: {list(failed.values())[-1]}"
        )

    async def load(self, version: int, *, path: Path) -> None:
        """Moves every server to `version`, all at once.

        A server that fails is dropped and handed to `lost`. Raises EngineError with everything as
        it was when the directory isn't what it says, and when no server could follow.
        """
        async with self._loading:
            manifest = await asyncio.to_thread(check_version, path, version)
            servers = list(self._servers.values())
            results = await asyncio.gather(
                *(server.load(version, path=path) for server in servers), return_exceptions=True
            )
            # Set even where every server failed: their successors start with the new version.
            self._version, self._path, self._digest = version, path, manifest.digest
            for server, result in zip(servers, results, strict=True):
                if isinstance(result, BaseException):
                    self._lose(server, str(result))
            if servers and not self._servers:
                raise EngineError(
                    f"no server could load version {version}, they are replaced: {results[0]}"
                )

    async def close(self) -> None:
        self._closed = True
        async with self._changed:
            self._changed.notify_all()
        for server in list(self._servers.values()):
            self._drop(server)
        for task in self._background:
            if task.get_name() == "health":
                task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _ask(
        self, server: Server, prompt_ids: tuple[int, ...], sampling: Sampling
    ) -> Completion:
        """One request to one server; ends with ServerGone when the server is dropped meanwhile."""
        running = self._running[server.address]
        task = asyncio.ensure_future(server.generate(prompt_ids, sampling=sampling))
        running.add(task)
        try:
            completion = await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and not current.cancelling():
                raise ServerGone(f"{server.address} was given up") from None
            raise
        finally:
            running.discard(task)
        if completion.finish_reason == "abort":
            raise ServerGone(f"{server.address} gave up a request")
        return completion

    async def _pump(
        self, server: Server, prompt_ids: tuple[int, ...], sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        """One server's stream, read by a task that ends with the server."""
        chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()

        async def read() -> None:
            async with aclosing(_stream(server, prompt_ids, sampling)) as stream:
                async for chunk in stream:
                    if chunk.finish_reason == "abort":
                        raise ServerGone(f"{server.address} gave up a request")
                    chunks.put_nowait(chunk)

        running = self._running[server.address]
        task = asyncio.get_running_loop().create_task(read())
        running.add(task)
        task.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            if task.cancelled():
                raise ServerGone(f"{server.address} was given up")
            task.result()
        finally:
            running.discard(task)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _place(self, affinity: str, num_prompt_tokens: int, failed: dict[str, str]) -> Ticket:
        """A place on some server; waits for one while none is well."""
        try:
            async with asyncio.timeout(self._patience_seconds), self._changed:
                while True:
                    if self._closed:
                        raise EngineError("the engine is closed")
                    ticket = self._balancer.choose(
                        affinity, num_prompt_tokens=num_prompt_tokens, avoid=failed
                    )
                    if ticket is not None:
                        return ticket
                    await self._changed.wait()
        except TimeoutError as err:
            last = f"; the last failure: {list(failed.values())[-1]}" if failed else ""
            raise EngineError(
                f"no inference server was well within {self._patience_seconds:g} s{last}"
            ) from err

    async def _doubt(self, server: Server, reason: str) -> None:
        """A request failed: one look tells whether the server or only the request was at fault."""
        if self._servers.get(server.address) is not server:
            return
        try:
            await server.check()
        except EngineError:
            self._lose(server, reason)

    def _lose(self, server: Server, reason: str) -> None:
        if self._servers.get(server.address) is server:
            log.warning("inference server %s is lost: %s", server.address, reason)
            self.num_lost += 1
            self._drop(server)
            self._lost(server)

    def _drop_retired(self, address: str) -> None:
        server = self._servers.get(address)
        idle = self._balancer.in_flight(address) == 0
        if server is not None and address in self._retired and idle:
            self._drop(server)

    def _drop(self, server: Server) -> None:
        address = server.address
        self._servers.pop(address, None)
        self._retired.discard(address)
        self._missed.pop(address, None)
        self._balancer.leave(address)
        for task in self._running.pop(address, set()):
            task.cancel()
        self._spawn(server.close(), name="close")

    async def _watch_forever(self) -> None:
        while True:
            await asyncio.sleep(self._health_every_seconds)
            await asyncio.gather(*(self._look_at(s) for s in list(self._servers.values())))

    async def _look_at(self, server: Server) -> None:
        """Drains a server that doesn't answer, takes it back when it does, gives it up at last."""
        address = server.address
        try:
            await server.check()
        except EngineError as err:
            if self._servers.get(address) is not server:
                return
            self._missed[address] += 1
            self._balancer.drain(address)
            if self._missed[address] >= MAX_MISSED_CHECKS:
                self._lose(server, str(err))
            return
        if self._servers.get(address) is not server or address in self._retired:
            return
        if self._missed.pop(address, 0):
            async with self._changed:
                self._balancer.join(address)
                self._changed.notify_all()

    def _spawn(self, work: "asyncio._CoroutineLike[None]", *, name: str = "health") -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _stream(
    server: Server, prompt_ids: tuple[int, ...], sampling: Sampling
) -> AsyncGenerator[Chunk, None]:
    if isinstance(server, StreamingServer):
        return server.stream(prompt_ids, sampling=sampling)
    return as_one_chunk(server.generate(prompt_ids, sampling=sampling))
