"""What the fake inference servers have in common: answers, events, and noticing a client that left.

Standard library alone: fakes run as plain scripts, under an interpreter without this package too.
"""

import json
import select
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeHandler(BaseHTTPRequestHandler):
    """One connection; says nothing to the log and asks no name server."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def address_string(self) -> str:
        return "client"

    def body(self) -> Any:
        """The request's JSON; None without any."""
        length = int(self.headers.get("Content-Length") or 0)
        return json.loads(self.rfile.read(length) or b"null")

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    def client_is_gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        try:
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def begin_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, body: Any) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        self._chunk(f"data: {text}\n\n".encode())

    def end_events(self) -> None:
        self.event("[DONE]")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        try:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()
        except OSError:  # noticed as a client that is gone
            self.close_connection = True


class UnixServer(ThreadingHTTPServer):
    """Listens on a Unix socket."""

    address_family = socket.AF_UNIX
    daemon_threads = True

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)


class PortServer(ThreadingHTTPServer):
    """Listens on a port, without the name look-up of the standard one."""

    daemon_threads = True

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)
