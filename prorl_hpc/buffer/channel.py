"""Request and reply over one CURVE DEALER socket that finds the buffer again after a restart.

Knows timing and sockets, nothing of what the messages mean. A request is sent again, with the same
number, until its reply is there; the buffer treats it as the same request.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from prorl_hpc.buffer import frames
from prorl_hpc.buffer.keys import ClientKeys
from prorl_hpc.buffer.messages import (
    FORMAT,
    MAX_FRAME_BYTES,
    AnyReply,
    AnyRequest,
    BufferGone,
    Envelope,
    Fenced,
    Refusal,
    Refused,
    WireError,
)

Locate = Callable[[], str | None]
"""Where the buffer is now (`tcp://host:port`); None while it isn't up."""

R = TypeVar("R", bound=msgspec.Struct)

RESEND_SECONDS = 5.0
BULK_RESEND_SECONDS = 30.0
LOOK_SECONDS = 0.5
"""The published endpoint (a file on the shared file system) is read at most so often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who this client is."""

    run: str
    worker: str
    attempt: int
    session: int = field(default_factory=lambda: secrets.randbits(63))

    def envelope(self, request: int) -> Envelope:
        return Envelope(
            format=FORMAT,
            run=self.run,
            worker=self.worker,
            attempt=self.attempt,
            session=self.session,
            request=request,
        )


def configure(socket: "zmq.Socket[Any]", *, keys: ClientKeys) -> None:
    """CURVE, bounded queues, heartbeats and no linger on a client's socket."""
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.curve_serverkey = keys.server_public
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 64)
    socket.setsockopt(zmq.RCVHWM, 64)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)


def checked(reply: AnyReply, *, address: str) -> AnyReply:
    """The reply itself; raises Fenced or Refused for a refusal."""
    if isinstance(reply, Refusal):
        message = f"buffer at {address}: {reply.reason}"
        if reply.code == "fenced":
            raise Fenced(message)
        raise Refused(message, code=reply.code)
    return reply


def gone(address: str | None, *, seconds: float) -> BufferGone:
    """The error of a client that has waited long enough."""
    where = address or "(no endpoint published)"
    return BufferGone(
        f"no answer from the buffer at {where} for {seconds:.0f} s; look at logs/buffer of the run"
    )


def locator(locate: Locate | str) -> Locate:
    """A way to the buffer from its address, or the way itself."""
    if isinstance(locate, str):
        address: str = locate
        return lambda: address
    return locate


def expect(reply: object, want: type[R]) -> R:
    """The reply, which must be of that type."""
    if not isinstance(reply, want):
        raise WireError(
            f"the buffer answered {type(reply).__name__} where {want.__name__} was expected; "
            "use one version of prorl-hpc for the whole run"
        )
    return reply


class BlockingChannel:
    """For one thread: `ask` returns the reply or raises within its patience."""

    def __init__(
        self, locate: Locate, *, keys: ClientKeys, identity: Identity, patience_seconds: float
    ) -> None:
        self.address: str | None = None
        self._locate = locate
        self._keys = keys
        self._identity = identity
        self._patience_seconds = patience_seconds
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._requests = 0

    def ask(self, body: AnyRequest, *, wait_seconds: float = 0.0) -> AnyReply:
        """Sends `body` until it is answered. `wait_seconds`: how long the buffer may ponder it.

        Raises BufferGone, Fenced, Refused.
        """
        self._requests += 1
        number = self._requests
        message = frames.encode(self._identity.envelope(number), body)
        patience = self._patience_seconds + wait_seconds
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            step = min(RESEND_SECONDS + wait_seconds, max(deadline - time.monotonic(), 0.05))
            reply = self._exchange(message, number=number, seconds=step)
            if reply is not None:
                return checked(reply, address=str(self.address))
            wait_seconds = 0.0
        raise gone(self.address, seconds=patience)

    def close(self) -> None:
        """Closes the socket without lingering."""
        self._drop()
        self._context.term()

    def _exchange(self, message: list[bytes], *, number: int, seconds: float) -> AnyReply | None:
        deadline = time.monotonic() + seconds
        socket = self._connected()
        if socket is None:
            time.sleep(min(0.2, seconds))
            return None
        try:
            socket.send_multipart(message, flags=zmq.NOBLOCK)
        except zmq.Again:
            self._drop()
            return None
        while (left := deadline - time.monotonic()) > 0:
            if not socket.poll(int(min(left, 1.0) * 1000) + 1):
                if self._moved():
                    break
                continue
            parts = socket.recv_multipart()
            with suppress(WireError):
                if len(parts) == 2 and frames.decode_envelope(parts[0]).request == number:
                    return frames.decode_reply(parts[1])
        self._drop()
        return None

    def _moved(self) -> bool:
        return (self._locate() or self.address) != self.address

    def _connected(self) -> "zmq.Socket[bytes] | None":
        if self._socket is None:
            self.address = self._locate() or self.address
            if self.address is None:
                return None
            self._socket = self._context.socket(zmq.DEALER)
            configure(self._socket, keys=self._keys)
            self._socket.connect(self.address)
        return self._socket

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None


class AsyncChannel:
    """For one event loop: many requests at once over one socket."""

    def __init__(
        self, locate: Locate, *, keys: ClientKeys, identity: Identity, patience_seconds: float
    ) -> None:
        self.address: str | None = None
        self._locate = locate
        self._keys = keys
        self._identity = identity
        self._patience_seconds = patience_seconds
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[AnyReply]] = {}
        self._requests = 0
        self._made = time.monotonic()
        self._heard = 0.0
        self._looked = 0.0

    @property
    def silent_seconds(self) -> float:
        """Since the last reply, or since this channel was made."""
        return time.monotonic() - max(self._heard, self._made)

    async def ask(self, body: AnyRequest, *, arrays: Sequence[frames.Frame] = ()) -> AnyReply:
        """Sends `body` until it is answered. Raises BufferGone, Fenced, Refused."""
        # Big messages are only sent again on a socket that has been silent for long.
        patience = BULK_RESEND_SECONDS if arrays else RESEND_SECONDS
        self._requests += 1
        number = self._requests
        message = [*frames.encode(self._identity.envelope(number), body), *arrays]
        started = time.monotonic()
        future: asyncio.Future[AnyReply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            while time.monotonic() - max(started, self._heard) < self._patience_seconds:
                await self._send(message)
                resend = time.monotonic() + patience
                while time.monotonic() < resend and self._socket is not None:
                    done, _ = await asyncio.wait({future}, timeout=1.0)
                    if done:
                        return checked(future.result(), address=str(self.address))
                    self._reconsider()
        finally:
            self._waiting.pop(number, None)
        raise gone(self.address, seconds=self._patience_seconds)

    async def close(self) -> None:
        """Closes the socket without lingering."""
        await self._drop()
        self._context.term()

    async def _send(self, message: list[frames.Frame]) -> None:
        if self._socket is None and not self._connect():
            await asyncio.sleep(0.2)
            return
        assert self._socket is not None
        try:
            # Not wait_for: until Python 3.12 it may swallow a cancellation.
            async with asyncio.timeout(RESEND_SECONDS):
                await self._socket.send_multipart(message, copy=False)
        except (TimeoutError, zmq.ZMQError):
            await self._drop()

    def _connect(self) -> bool:
        self.address = self._locate() or self.address
        if self.address is None:
            return False
        self._socket = self._context.socket(zmq.DEALER)
        configure(self._socket, keys=self._keys)
        self._socket.connect(self.address)
        self._reader = asyncio.create_task(self._read(self._socket))
        return True

    def _reconsider(self) -> None:
        """Leaves a socket that has been silent, or whose buffer has moved."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return  # another request in flight has just looked
        self._looked = time.monotonic()
        moved = (self._locate() or self.address) != self.address
        if self._socket is None or not (
            moved or time.monotonic() - self._heard > 2 * RESEND_SECONDS
        ):
            return
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
        self._socket.close(linger=0)
        self._socket = None

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            parts = await socket.recv_multipart()
            with suppress(WireError):
                if len(parts) != 2:
                    continue
                future = self._waiting.get(frames.decode_envelope(parts[0]).request)
                reply = frames.decode_reply(parts[1])
                self._heard = time.monotonic()
                if future is not None and not future.done():
                    future.set_result(reply)

    async def _drop(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.wait({reader})  # raises nothing of the reader's
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
