"""The buffer's socket and its loop: one thread that never blocks on a disk or a client.

Knows frames, keys and timing; what is answered is decided in `service`.

    ROUTER ──► frames ──► Service ──► Dispatcher (memory)
                             │ ▲
                             ▼ │ eventfd
                           Store (thread: HDF5, fsync, manifest)
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from hpc.allocation import cpu_count
from prorl_hpc.buffer import frames, zap
from prorl_hpc.buffer.config import BufferConfig
from prorl_hpc.buffer.dispatcher import Dispatcher
from prorl_hpc.buffer.keys import ServerKeys
from prorl_hpc.buffer.manifest import Finished
from prorl_hpc.buffer.messages import (
    FORMAT,
    MAX_FRAME_BYTES,
    AnyReply,
    Envelope,
    Refusal,
    WireError,
)
from prorl_hpc.buffer.recovery import Recovered, quarantine_file, recover
from prorl_hpc.buffer.service import Address, Service
from prorl_hpc.buffer.store import Store
from prorl_hpc.buffer.watch import Watch
from prorl_hpc.run import Run

log = logging.getLogger(__name__)

POLL_MILLISECONDS = 100
MAX_IO_THREADS = 4
KEEP_BYTES = 256 << 20
"""Freed memory that the buffer's process keeps for the next messages."""
FAREWELL_SECONDS = 30.0
"""How long the buffer stays up after the run's end for nodes that haven't heard of it."""

HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Limits and terms of the server."""

    shard_bytes: int = 32 << 20
    seal_seconds: float = 0.2
    max_pending_bytes: int = 512 << 20
    """Beyond so many bytes on their way to the disk, pushes are sent back as busy."""
    max_message_bytes: int = MAX_FRAME_BYTES
    peer_seconds: float = 3600.0
    stall_seconds: float = 7200.0
    stop_seconds: float = 30.0
    """A clean stop takes at most so long."""
    goodbye_seconds: float = 5.0
    """How much of it may be spent on telling everybody."""
    farewell_seconds: float = FAREWELL_SECONDS
    report_seconds: float = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """Why the server ended."""

    finished: bool
    reason: str
    culprit: bool = False
    """Whether somebody was missing (the watchdog ended it)."""


@dataclass(slots=True)
class OnceLog:
    """Logs a kind of refusal once per peer; counts the rest."""

    seen: set[tuple[str, str]] = field(default_factory=set)
    count: int = 0

    def __call__(self, what: str, who: str) -> None:
        self.count += 1
        if (what, who) not in self.seen and len(self.seen) < 10_000:
            self.seen.add((what, who))
            log.warning("refused %s from %s", what, who)


class BufferServer:
    """Owns the sockets and the store of one attempt. Call `bind`, then `serve`, then `close`."""

    def __init__(
        self,
        run: Run,
        *,
        config: BufferConfig,
        server: ServerConfig,
        keys: ServerKeys,
        attempt: int,
        report: Callable[[Service], None] = lambda _service: None,
        stopping: Callable[[], str] = lambda: "",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._server = server
        self._now = now
        self._report = report
        self._keys = keys
        # Decryption is the server's largest cost: its threads share the nodes' connections.
        threads = max(1, min(MAX_IO_THREADS, cpu_count() // 3))
        self._context: zmq.Context[Any] = zmq.Context(io_threads=threads)
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self.refused = OnceLog()
        self._gate = zap.Gate(self._context, clients=keys.clients, refused=self.refused)
        self._monitor = self._router.get_monitor_socket(HANDSHAKE_FAILURES)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop = ""
        self._stopping = stopping
        recovered = recover(run, attempt=attempt)
        self._finished_before = next(
            (line for line in recovered.lines if isinstance(line, Finished)), None
        )
        self.service = self._make_service(config, recovered)
        self._watch = Watch(
            peer_seconds=server.peer_seconds, stall_seconds=server.stall_seconds, started=now()
        )

    def bind(self, host: str = "*") -> int:
        """Opens a port of the system's choice and returns it."""
        router = self._router
        router.setsockopt(zmq.LINGER, 1000)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.MAXMSGSIZE, 2 * self._server.max_message_bytes)
        router.setsockopt(zmq.RCVHWM, 16)
        router.setsockopt(zmq.SNDHWM, 256)
        router.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
        router.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
        router.setsockopt(zmq.ZAP_DOMAIN, zap.DOMAIN)
        router.curve_server = True
        router.curve_publickey = self._keys.public
        router.curve_secretkey = self._keys.secret
        return router.bind_to_random_port(f"tcp://{host}")

    def stop(self, reason: str) -> None:
        """Asks for a clean stop; safe in a signal handler and from other threads."""
        self._stop = reason

    def serve(self) -> Ended:
        """Runs until the run is finished, `stop`, or somebody is missing for too long."""
        if self._finished_before is not None:
            return Ended(finished=True, reason=self._finished_before.reason)
        service = self.service
        service.store.start()
        poller = zmq.Poller()
        for source in (self._router, self._gate.socket, self._monitor, self._wakeup):
            poller.register(source, zmq.POLLIN)
        reported, ending, culprit = 0.0, None, ""
        while True:
            self._turn(dict(poller.poll(POLL_MILLISECONDS)))
            now = self._now()
            if service.store.failure is not None:
                raise service.store.failure
            if service.phase == "running":
                culprit = self._look(now)
                reason = self._stop or self._stopping() or culprit
                if reason:
                    service.drain(reason)
            if service.phase != "running":
                ending = now if ending is None else ending
                if self._may_leave(now - ending):
                    break
            if now - reported >= self._server.report_seconds:
                reported = now
                self._report(service)
        self._report(service)
        finished = service.phase == "finished"
        return Ended(finished=finished, reason=service.end_reason, culprit=bool(culprit))

    def close(self) -> None:
        """Writes what is queued, closes sockets and files."""
        if not self._finished_before:
            self.service.store.stop(timeout_seconds=self._server.stop_seconds)
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._gate.close()
        self._router.close()
        self._context.term()
        os.close(self._wakeup)

    # --- inside

    def _make_service(self, config: BufferConfig, recovered: Recovered) -> Service:
        store = Store(
            self._run,
            owner=recovered.owner,
            token=recovered.token,
            shard_bytes=self._server.shard_bytes,
            seal_seconds=self._server.seal_seconds,
            wake=self._wake,
        )
        store.record(recovered.lost)
        store.restore(recovered.shards)
        # Lease ids of different attempts must not meet: nodes claim theirs after a restart.
        dispatcher = Dispatcher(config, first_lease_id=recovered.owner.owner << 32)
        dispatcher.restore(recovered.lines, now=self._now())
        return Service(
            dispatcher,
            store=store,
            run=self._run.name,
            max_pending_bytes=self._server.max_pending_bytes,
            send=self._send,
            quarantine=lambda shard, reason: quarantine_file(self._run, shard, reason=reason),
            now=self._now,
        )

    def _turn(self, events: dict[Any, int]) -> None:
        if self._wakeup in events:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)
        while self._gate.socket.poll(0):
            self._gate.answer()
        while self._monitor.poll(0):
            self._handshake_failed(self._monitor.recv_multipart())
        # A bounded number per turn: what has become durable is acked in between.
        for _ in range(64):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._receive(parts)
        self.service.advance()

    def _receive(self, parts: Sequence[zmq.Frame]) -> None:
        identity = parts[0].bytes
        role, where = _metadata(parts[1], "User-Id"), _metadata(parts[1], "Peer-Address")
        envelope = Envelope(format=FORMAT, run="", worker="", attempt=0, session=0, request=0)
        try:
            if len(parts) < 3:
                raise WireError(f"a message of {len(parts) - 1} frames; want at least 2")
            envelope = frames.decode_envelope(parts[1].buffer)
            size = sum(len(part) for part in parts)
            if size > self._server.max_message_bytes:
                raise WireError(
                    f"message of {size} bytes; at most {self._server.max_message_bytes}"
                )
            address = Address(identity=identity, envelope=envelope)
            body = frames.decode_request(parts[2].buffer)
            self.service.handle(address, role, body, [part.buffer for part in parts[3:]])
        except WireError as err:
            self.refused(f"a message ({err})", where)
            reply = Refusal(code="malformed", reason=str(err))
            self._send(Address(identity=identity, envelope=envelope), reply)

    def _send(self, address: Address, reply: AnyReply) -> None:
        parts = [address.identity, *frames.encode(address.envelope, reply)]
        try:
            self._router.send_multipart(parts, flags=zmq.NOBLOCK)
        except zmq.ZMQError as err:
            # Gone, or not reading: a client that still wants the answer asks again.
            if err.errno not in (zmq.EHOSTUNREACH, errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            self.service.counters["unreachable"] += 1

    def _handshake_failed(self, message: list[bytes]) -> None:
        event = parse_monitor_message(message)
        endpoint = event["endpoint"].decode(errors="replace")
        self.refused(f"a handshake ({zmq.Event(event['event']).name})", endpoint)

    def _look(self, now: float) -> str:
        service, watch = self.service, self._watch
        watch.learner_heard = service.peers.newest("learner")
        watch.rollout_heard = service.peers.newest("rollout")
        idle = not len(service.dispatcher.leases) or bool(service.store.paused)
        watch.progressed = now if idle else max(service.last_stored, watch.progressed or 0.0)
        return watch.culprit(now)

    def _may_leave(self, seconds: float) -> bool:
        """Whether all is written and told, or it has taken too long."""
        service, server = self.service, self._server
        roles = ("rollout",) if service.phase == "finished" else ("rollout", "learner")
        silence = service.dispatcher.config.lease_seconds
        if service.phase == "finished":
            # Nobody comes after this buffer: a node that was heard a moment ago is waited for.
            silence = max(silence, server.farewell_seconds)
        alive = self._now() - silence
        told = all(p.told_end or p.heard < alive for r in roles for p in service.peers.of(r))
        if service.phase == "finished":
            return (told and service.settled) or seconds > server.farewell_seconds
        told = told or seconds > server.goodbye_seconds
        return (told and service.settled) or seconds > server.stop_seconds

    def _wake(self) -> None:
        with suppress(OSError):  # the loop is gone: nobody is to be woken
            os.eventfd_write(self._wakeup, 1)


def _metadata(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name))
    except (zmq.ZMQError, KeyError):
        return ""
