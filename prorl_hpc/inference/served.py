"""The engine of a rollout node that owns none: servers in jobs of their own, which come and go.

    Board (files) --appears--> check --> pool.join        requests --> pool --> RemoteServer
                  --vanishes-> pool.retire                lost server: elsewhere; none: wait

While no server is there, the time limits of episodes stand still; after a bound the node ends and
says who is missing. Knows nothing of how a server is started.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

from hpc.endpoints import culprit
from prorl_hpc.inference.announce import Announcement, Board
from prorl_hpc.inference.balancer import FIRST_WINDOW
from prorl_hpc.inference.engine import Chunk, Completion, EngineError, Sampling
from prorl_hpc.inference.http_pool import HttpPool
from prorl_hpc.inference.remote import RemoteServer, conversation
from prorl_hpc.inference.server import Server
from prorl_hpc.rollout.limits import TimeLimits
from prorl_hpc.run import Run

log = logging.getLogger("prorl_hpc.inference")

ROLE = "inference"
LOOK_SECONDS = 2.0
"""Pause between two looks at the announcements."""

JUDGE_SECONDS = 0.2
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedOptions:
    """Numbers of one node's engine."""

    request_seconds: float
    missing_seconds: float
    """So long without any server, and the node ends."""
    num_clients: int = 1
    """Nodes that share the servers."""
    look_seconds: float = LOOK_SECONDS


class ServedEngine:
    """An engine over whatever servers are announced. One event loop."""

    def __init__(
        self,
        run: Run,
        *,
        token: str,
        version: int,
        limits: TimeLimits,
        options: ServedOptions,
        board: Board | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`version` is served for all that is known before the first server is heard."""
        self._run = run
        self._token = token
        self._version = version
        self._newest = version
        self._limits = limits
        self._options = options
        self._board = board or Board(run)
        self._clock = clock
        self.pool = HttpPool(
            version=version,
            patience_seconds=10 * options.missing_seconds,  # the node ends before
            lost=self._lost,
            first_window=max(1, FIRST_WINDOW // options.num_clients),
        )
        self._joined: dict[str, RemoteServer] = {}
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._pauses: dict[str, tuple[float, float]] = {}
        """By identity: length of the last pause, and when it is over."""
        self._starved_since: float | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def version(self) -> int:
        """Version that a server was last heard to serve."""
        return self._version

    @property
    def missing(self) -> str:
        """Who is missing, once no server was there for too long; empty while there is hope."""
        bound = self._options.missing_seconds
        since = self._starved_since
        if since is None or self._clock() - since < bound:
            return ""
        return f"no inference server for {bound:g} s: {culprit(self._run, ROLE)}"

    @property
    def note(self) -> str:
        """One line for people while no server is there."""
        since = self._starved_since
        if since is None:
            return ""
        return f"no inference server for {self._clock() - since:.0f} s"

    async def start(self) -> None:
        """Begins to look for servers; returns at once."""
        await self.pool.start()
        self._judge()
        self._tasks = [
            asyncio.create_task(self._look_forever(), name="look"),
            asyncio.create_task(self._judge_forever(), name="judge"),
        ]

    async def generate(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> Completion:
        conversation.set(affinity)
        return await self.pool.generate(prompt_ids, sampling=sampling, affinity=affinity)

    def stream(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        """Answers come whole from inference jobs: one chunk each."""
        conversation.set(affinity)
        return self.pool.stream(prompt_ids, sampling=sampling, affinity=affinity)

    async def load(self, version: int, *, path: Path) -> None:  # noqa: ARG002
        """Servers follow by themselves; those that haven't heard of it yet are told."""
        self.hint(version)

    def hint(self, version: int) -> None:
        """The newest published version: it goes along with every request."""
        self._newest = version

    async def close(self) -> None:
        tasks = [*self._tasks, *self._joining.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._limits.resume()
        await self.pool.close()

    async def _look_forever(self) -> None:
        while True:
            try:
                found = await asyncio.to_thread(self._board.look)
                self._follow({one.identity: one for one in found})
            except Exception:  # a defect or a file system's mood: the servers known stay in use
                log.exception("the announcements can't be followed")
            await asyncio.sleep(self._options.look_seconds)

    def _follow(self, announced: dict[str, Announcement]) -> None:
        """Retires what is announced no more, takes in what is new."""
        for identity in [name for name in self._joined if name not in announced]:
            server = self._joined.pop(identity)
            log.info("inference server %s leaves", server.address)
            self.pool.retire(server.address)
        for identity in [name for name in self._pauses if name not in announced]:
            del self._pauses[identity]
        now = self._clock()
        for identity, announcement in announced.items():
            due = self._pauses.get(identity, (0.0, now))[1] <= now
            if due and identity not in self._joined and identity not in self._joining:
                task = asyncio.create_task(self._join(announcement))
                self._joining[identity] = task
                task.add_done_callback(lambda _, name=identity: self._joining.pop(name))  # type: ignore[misc]

    async def _join(self, announcement: Announcement) -> None:
        server = RemoteServer(
            announcement,
            token=self._token,
            request_seconds=self._options.request_seconds,
            newest=lambda: self._newest,
            heard=self._heard,
            drains=self.pool.retire,
        )
        try:
            await server.check()
            if server.draining:
                raise EngineError(f"{server.address} takes nothing more")
            await self.pool.leave(server.address)  # an earlier process at the same port
            await self.pool.join(server)
        except EngineError as err:
            self._pause(announcement.identity)
            log.info("inference server %d isn't taken in: %s", announcement.index, err)
            await server.close()
            return
        except BaseException:
            await server.close()
            raise
        for earlier in [
            name for name, one in self._joined.items() if one.address == server.address
        ]:
            del self._joined[earlier]  # else the end of its announcement would retire this one
        self.pool.observe(server.address, num_requests=server.in_flight)  # known since the check
        self._joined[announcement.identity] = server
        self._judge()
        log.info("inference server %s joins", server.address)

    def _pause(self, identity: str) -> None:
        before = self._pauses.get(identity, (FIRST_PAUSE_SECONDS / 2, 0.0))[0]
        seconds = min(2 * before, LONGEST_PAUSE_SECONDS)
        self._pauses[identity] = (seconds, self._clock() + seconds)

    def _lost(self, server: Server) -> None:
        """The pool gave it up; it may come back as long as it is announced."""
        assert isinstance(server, RemoteServer)
        self._joined.pop(server.announcement.identity, None)
        self._pause(server.announcement.identity)

    def _heard(self, address: str, version: int, in_flight: int) -> None:
        self._version = version
        self.pool.observe(address, num_requests=in_flight)

    async def _judge_forever(self) -> None:
        while True:
            await asyncio.sleep(JUDGE_SECONDS)
            self._judge()

    def _judge(self) -> None:
        """Whether anybody can serve, just now."""
        if self.pool.servers:
            self._starved_since = None
            self._limits.resume()
        elif self._starved_since is None:
            self._starved_since = self._clock()
            self._limits.pause()
