"""Lets in clients whose public key is on the run's list (ZMTP authentication, ZeroMQ RFC 27)."""

from collections.abc import Callable

import zmq
from zmq.utils import z85

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"prorl-hpc"


class Gate:
    """The authentication handler of one ZeroMQ context; poll `socket`, then call `answer`."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        clients: dict[bytes, str],
        refused: Callable[[str, str], None],
    ) -> None:
        self._clients = clients
        self._refused = refused
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ENDPOINT)

    def answer(self) -> None:
        """Answers one waiting question; the user id of an admitted client is its role."""
        parts = self.socket.recv_multipart()
        version, request, domain, peer = parts[:4]
        role = None
        if version == b"1.0" and domain == DOMAIN and parts[5:6] == [b"CURVE"] and len(parts) == 7:
            role = self._clients.get(z85.encode(parts[6]))
        if role is None:
            self._refused("a client without a key of this run", peer.decode(errors="replace"))
            self.socket.send_multipart([version, request, b"400", b"unknown key", b"", b""])
        else:
            self.socket.send_multipart([version, request, b"200", b"OK", role.encode(), b""])

    def close(self) -> None:
        self.socket.close(linger=0)
