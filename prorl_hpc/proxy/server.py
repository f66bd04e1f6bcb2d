"""HTTP/1.1 on a private Unix socket, for programs that aren't trusted. Knows bytes, no API.

    connection: request -> handler -> reply, again and again; end of file cancels the handler

Bounds: body and header bytes, connections. Other users are turned away by the directory's and the
socket's modes, and by the peer's user id. h11 parses; it is imported with this module, which only
nodes with such programs load.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import h11

log = logging.getLogger("prorl_hpc.proxy")

MAX_BODY_BYTES = 4 << 20
MAX_HEADER_BYTES = 64 << 10
MAX_CONNECTIONS = 32
LINGER_SECONDS = 5.0
"""How long the rest of a refused body is read over, so that its sender reads the refusal."""

READ_BYTES = 1 << 16
JSON = MappingProxyType({"content-type": "application/json"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request."""

    method: str
    path: str
    """Without the query."""
    body: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One answer."""

    status: int
    body: bytes | AsyncGenerator[bytes, None]
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)


T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Reply]]
Problem = Callable[[int, str], Reply]
"""(status, message) -> what a client is told that speaks no proper HTTP."""


class PeerGone(Exception):
    """The client closed its connection."""


class SocketServer:
    """Serves one episode; used as `async with`."""

    def __init__(
        self, path: Path, *, handler: Handler, problem: Problem,
        max_body_bytes: int = MAX_BODY_BYTES, max_connections: int = MAX_CONNECTIONS,
    ) -> None:  # fmt: skip
        self._path = path
        self._handler = handler
        self._problem = problem
        self._max_body_bytes = max_body_bytes
        self._max_connections = max_connections
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._directory = -1

    async def __aenter__(self) -> Self:
        # Socket addresses hold 107 bytes: a long path is named through its directory.
        self._directory = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(f"/proc/self/fd/{self._directory}/{self._path.name}")
            self._path.chmod(0o600)  # before it listens, so that nobody was let in until now
            self._server = await asyncio.start_unix_server(
                self._accept, sock=listener, limit=READ_BYTES
            )
        except BaseException:
            listener.close()
            os.close(self._directory)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        self._path.unlink(missing_ok=True)
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        os.close(self._directory)

    @property
    def num_connections(self) -> int:
        """Open just now."""
        return len(self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(reader, writer, max_body_bytes=self._max_body_bytes)
        try:
            peer = writer.get_extra_info("socket")
            if _user_of(peer) != os.geteuid():
                log.warning("a connection of another user was turned away")
                return
            if len(self._connections) > self._max_connections:
                await connection.refuse(self._problem(503, "too many connections; close some"))
                return
            while await self._exchange(connection):
                pass
        except (PeerGone, ConnectionError):
            pass
        except Exception:
            # A defect here; one connection must not end the worker.
            log.exception("a connection failed")
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _exchange(self, connection: "_Connection") -> bool:
        """One request and its answer; whether another may come."""
        try:
            request = await connection.request()
        except h11.RemoteProtocolError as err:
            await connection.refuse(self._problem(err.error_status_hint, str(err)))
            return False
        if request is None:
            return False
        reply = await connection.unless_gone(self._handle(request))
        await connection.unless_gone(connection.send(reply, head=request.method == "HEAD"))
        return connection.next()

    async def _handle(self, request: Request) -> Reply:
        try:
            return await self._handler(request)
        except Exception:
            # A defect here; the client hears of it, and the connection goes on.
            log.exception("%s %s failed", request.method, request.path)
            return self._problem(500, "a defect of the server; see the log of the rollout node")


class _Connection:
    """h11 over a pair of streams."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, max_body_bytes: int
    ) -> None:
        self._reader, self._writer = reader, writer
        self._max_body_bytes = max_body_bytes
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self._num_ahead = 0

    async def request(self) -> Request | None:
        """The next request; None at the end. Raises h11.RemoteProtocolError."""
        head = await self._event()
        if not isinstance(head, h11.Request):
            return None
        length = next((int(v) for k, v in head.headers if k == b"content-length"), 0)
        if length > self._max_body_bytes:
            raise self._too_large()
        body = bytearray()
        while isinstance(event := await self._event(), h11.Data):
            body += event.data
            if len(body) > self._max_body_bytes:
                raise self._too_large()
        if not isinstance(event, h11.EndOfMessage):
            raise PeerGone
        path = head.target.decode("ascii", "replace").partition("?")[0]
        return Request(method=head.method.decode(), path=path, body=bytes(body))

    def _too_large(self) -> h11.RemoteProtocolError:
        return h11.RemoteProtocolError(
            f"the body has more than {self._max_body_bytes} bytes", error_status_hint=413
        )

    async def _event(self) -> object:
        while True:
            event = self._h11.next_event()
            if event is not h11.NEED_DATA:
                return event
            if self._h11.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                self._writer.write(self._h11.send(go_on) or b"")
            self._h11.receive_data(await self._reader.read(READ_BYTES))

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the client goes. Raises PeerGone."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._until_gone())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise PeerGone
            return task.result()
        finally:
            for one in (task, watch):
                one.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _until_gone(self) -> None:
        while self._num_ahead <= MAX_HEADER_BYTES:
            data = await self._reader.read(READ_BYTES)
            if not data:
                return
            self._num_ahead += len(data)
            self._h11.receive_data(data)
        await asyncio.Event().wait()  # who sends so much ahead isn't watched any more

    async def send(self, reply: Reply, *, head: bool = False) -> None:
        """Writes an answer."""
        headers = list(reply.headers.items())
        if isinstance(reply.body, bytes):
            headers.append(("content-length", str(len(reply.body))))
        self._write(h11.Response(status_code=reply.status, headers=headers))
        if isinstance(reply.body, bytes):
            if not head:
                self._write(h11.Data(data=reply.body))
        else:
            async with contextlib.aclosing(reply.body) as parts:
                async for part in parts:
                    self._write(h11.Data(data=part))
                    await self._writer.drain()
        self._write(h11.EndOfMessage())
        await self._writer.drain()

    def _write(self, event: h11.Event) -> None:
        self._writer.write(self._h11.send(event) or b"")

    async def refuse(self, reply: Reply) -> None:
        """The last answer of a connection whose request wasn't read to its end."""
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        headers = dict(reply.headers) | {"connection": "close"}
        await self.send(Reply(status=reply.status, body=reply.body, headers=headers))
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LINGER_SECONDS):
                self._writer.write_eof()
                while await self._reader.read(READ_BYTES):
                    pass

    def next(self) -> bool:
        """Makes ready for another request, where the connection may take one."""
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        self._num_ahead = 0
        return True


def _user_of(peer: socket.socket) -> int:
    """User id of who connected, as this process sees it."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", raw)
    return int(user)
