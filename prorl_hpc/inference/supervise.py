"""Inference servers as processes: start, wait until well, restart with back-off, stop with the job.

Knows processes, logs and addresses; what a server's command line is and how it is spoken to comes
in from outside. Servers listen on a Unix socket in a private directory, or on a port of 127.0.0.1
that was free; either way they say a random name, so that nobody else's server is taken for ours.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpc.scratch import OwnedDirectory
from prorl_hpc.inference.engine import EngineError
from prorl_hpc.inference.guard import GRACE_SECONDS
from prorl_hpc.inference.http_pool import HttpPool
from prorl_hpc.inference.server import Server
from prorl_hpc.policy import digest_at

log = logging.getLogger("prorl_hpc.inference")

LAST_LINES = 12
FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 120.0
POLL_SECONDS = 0.2


MAX_PORTS = 5
"""So many ports in a row may be taken by others between their choice and the server's start."""


class PortTaken(EngineError):
    """Somebody else got the port that was chosen for a server: another one is tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How one server process is started."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    address: str
    """Where it will listen."""
    identity: str
    """What it will call itself."""


class MakeLaunch(Protocol):
    """Writes the command line of a server."""

    def __call__(self, *, slot: int, address: str, identity: str, path: Path) -> Launch: ...


class ServerProcess:
    """One process under its guard."""

    def __init__(self, launch: Launch, *, log_path: Path) -> None:
        self.launch = launch
        self.log_path = log_path
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Raises EngineError when the command can't be run at all."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        root = str(Path(__file__).resolve().parents[2])
        with self.log_path.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                _GUARD,
                root,
                "--",
                *self.launch.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=dict(self.launch.environment),
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode if self._process else None

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """Ends the whole group; returns when nothing of it is left."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(GRACE_SECONDS + 10):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def last_words(self) -> str:
        """The last lines that the server wrote."""
        try:
            with self.log_path.open("rb") as stream:
                stream.seek(max(0, self.log_path.stat().st_size - 16384))
                lines = stream.read().decode(errors="replace").splitlines()
        except OSError:
            return "(it wrote nothing)"
        kept = [line.strip() for line in lines if line.strip()][-LAST_LINES:]
        return "\n  ".join(kept) or "(it wrote nothing)"


_GUARD = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from prorl_hpc.inference.guard import main; sys.exit(main())"
)
"""Starts the guard from this very copy of the package, whatever PYTHONPATH the server gets."""


class Fleet:
    """Keeps `num_servers` processes running, and the pool told about them."""

    def __init__(
        self,
        *,
        pool: HttpPool,
        num_servers: int,
        make_launch: MakeLaunch,
        connect: Callable[[Launch, int], Awaitable[Server]],
        start_seconds: float,
        log_directory: Path,
        use_ports: bool = False,
        first_backoff_seconds: float = FIRST_BACKOFF_SECONDS,
    ) -> None:
        """`connect` returns a server that is well and ours, or raises EngineError (try again)."""
        self._pool = pool
        self._num_servers = num_servers
        self._make_launch = make_launch
        self._connect = connect
        self._start_seconds = start_seconds
        self._log_directory = log_directory
        self._use_ports = use_ports
        self._first_backoff_seconds = first_backoff_seconds
        self._sockets: OwnedDirectory | None = None
        self._slots: list[asyncio.Task[None]] = []
        self._replace: dict[str, asyncio.Event] = {}
        self.num_restarts = 0

    def lost(self, server: Server) -> None:
        """The pool gave a server up: it is ended and replaced."""
        event = self._replace.get(server.address)
        if event is not None:
            event.set()

    async def start(self) -> None:
        """Starts every server; returns once one is up and each of the others is too or failed.

        Raises EngineError with the last words of a server when none comes up.
        """
        self._sockets = OwnedDirectory.make("servers")
        first: list[asyncio.Future[None]] = []
        for slot in range(self._num_servers):
            told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            first.append(told)
            self._slots.append(asyncio.create_task(self._keep(slot, told), name=f"server-{slot}"))
        results = await asyncio.gather(*first, return_exceptions=True)
        errors = [r for r in results if isinstance(r, BaseException)]
        if len(errors) == self._num_servers:
            await self.close()
            raise errors[0]
        for error in errors:
            log.warning("%s", error)

    async def close(self) -> None:
        """Ends every server."""
        for task in self._slots:
            task.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        self._slots.clear()
        sockets, self._sockets = self._sockets, None
        if sockets is not None:
            sockets.close()

    async def _keep(self, slot: int, told: "asyncio.Future[None]") -> None:
        """One server after another, for ever; `told` hears how the first start went."""
        backoff = self._first_backoff_seconds
        attempt = 0
        while True:
            try:
                if await self._run(slot, attempt, told):
                    backoff = self._first_backoff_seconds
            except PortTaken as err:
                if attempt + 1 >= MAX_PORTS and not told.done():
                    told.set_exception(err)
                log.warning("%s", err)
            except (EngineError, OSError) as err:
                if not told.done():
                    told.set_exception(err)
                log.warning("%s", err)
            attempt += 1
            self.num_restarts += 1
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF_SECONDS)

    async def _run(self, slot: int, attempt: int, told: "asyncio.Future[None]") -> bool:
        """One process from its start to its end; True when it had come up."""
        version, path = self._pool.version, self._pool.path
        assert path is not None
        digest = await asyncio.to_thread(digest_at, path)
        launch = self._make_launch(
            slot=slot,
            address=self._address(slot, attempt),
            identity=f"policy-{secrets.token_hex(8)}",
            path=path,
        )
        process = ServerProcess(launch, log_path=self._log_directory / f"server-{slot}.log")
        lost = asyncio.Event()
        self._replace[launch.address] = lost
        try:
            await process.start()
            server = await self._until_well(process, version)
            try:
                await self._pool.join(server, digest=digest)
            except BaseException:
                await server.close()
                raise
            if not told.done():
                told.set_result(None)
            ended = asyncio.create_task(process.wait())
            given_up = asyncio.create_task(lost.wait())
            try:
                await asyncio.wait({ended, given_up}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
                given_up.cancel()
            log.warning("inference server %s ended: %s", launch.address, process.last_words())
            return True
        finally:
            self._replace.pop(launch.address, None)
            await self._pool.leave(launch.address)
            await asyncio.shield(process.stop())

    async def _until_well(self, process: ServerProcess, version: int) -> Server:
        until = asyncio.get_running_loop().time() + self._start_seconds
        while True:
            code = process.exit_code
            if code is not None:
                kind = PortTaken if port_is_taken(process.launch.address) else EngineError
                raise kind(
                    f"an inference server ended with {code} before it was well; its last words:\n"
                    f"  {process.last_words()}"
                )
            try:
                return await self._connect(process.launch, version)
            except EngineError as err:
                if asyncio.get_running_loop().time() > until:
                    raise EngineError(
                        f"an inference server wasn't well within {self._start_seconds:g} s "
                        f"({err}); its last words:\n  {process.last_words()}"
                    ) from err
            await asyncio.sleep(POLL_SECONDS)

    def _address(self, slot: int, attempt: int) -> str:
        if self._use_ports:
            return f"http://127.0.0.1:{free_port()}"
        assert self._sockets is not None
        return f"unix:{self._sockets.path / f'{slot}.{attempt}'}"


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_taken(address: str) -> bool:
    """Whether somebody listens on an address's port of 127.0.0.1."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    if not address.startswith("http://"):
        return False
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return True
        return False
