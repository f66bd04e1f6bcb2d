"""CURVE keys of a run: one pair per role, made at submit. Knows files, no socket's traffic.

A role's script reads its own pair and the server's public key; the server reads all public keys
and refuses every other client.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from hpc.errors import UserError
from hpc.files import publish
from hpc.rundir import RunDirectory

FORMAT = 1
CLIENT_ROLES = ("rollout", "learner", "observer")
ROLES = ("server", *CLIENT_ROLES)


class KeysError(UserError, RuntimeError):
    """Key files that are missing, damaged, or readable by others."""


class KeyPair(msgspec.Struct, frozen=True, kw_only=True):
    """One CURVE key pair, Z85."""

    format: int
    public: str
    secret: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientKeys:
    """What a client needs to talk to the buffer of its run."""

    public: bytes
    secret: bytes = field(repr=False)
    server_public: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerKeys:
    """What the buffer needs: its pair and the clients that it lets in."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: dict[bytes, str]
    """Public key -> role."""


def make_keys(run: RunDirectory) -> None:
    """Makes the key files that don't exist yet (submitting twice keeps the keys)."""
    run.secrets.mkdir(mode=0o700, parents=True, exist_ok=True)
    run.secrets.chmod(0o700)
    for role in ROLES:
        path = _path(run, role)
        if not path.exists():
            public, secret = zmq.curve_keypair()
            pair = KeyPair(format=FORMAT, public=public.decode(), secret=secret.decode())
            publish(path, data=msgspec.json.encode(pair), mode=0o600)


def load_client_keys(run: RunDirectory, *, role: str) -> ClientKeys:
    """Keys of `rollout`, `learner` or `observer`. Raises KeysError."""
    pair = _load(_path(run, role))
    server = _load(_path(run, "server"))
    return ClientKeys(
        public=pair.public.encode(),
        secret=pair.secret.encode(),
        server_public=server.public.encode(),
    )


def load_server_keys(run: RunDirectory) -> ServerKeys:
    """The server's pair and its allow-list. Raises KeysError."""
    server = _load(_path(run, "server"))
    clients = {_load(_path(run, role)).public.encode(): role for role in CLIENT_ROLES}
    return ServerKeys(public=server.public.encode(), secret=server.secret.encode(), clients=clients)


def _path(run: RunDirectory, role: str) -> Path:
    return run.secrets / f"curve-{role}.json"


def _load(path: Path) -> KeyPair:
    try:
        status = path.stat()
        data = path.read_bytes()
    except OSError as err:
        raise KeysError(
            f"key file {path} can't be read ({err.strerror}); submit the run again to make it"
        ) from err
    if status.st_mode & 0o077 or status.st_uid not in (os.getuid(), 0):
        raise KeysError(f"key file {path} is open to others; run `chmod 600` on it as its owner")
    try:
        pair = msgspec.json.decode(data, type=KeyPair)
    except msgspec.MsgspecError as err:
        raise KeysError(f"key file {path} is damaged ({err}); delete it and submit again") from err
    if pair.format > FORMAT:
        raise KeysError(f"format={pair.format} of {path} is newer than {FORMAT}; upgrade prorl-hpc")
    return pair
