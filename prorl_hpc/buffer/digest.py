"""Digests that tell whether a shard's bytes are those that were sealed. Knows no shard.

A digest names its algorithm. XXH3 (128 bits) finds damage as surely as SHA-256 at a twentieth of
its cost; it doesn't stop somebody who may write the run directory, but neither does any digest that
lies in it. Where the package isn't installed, SHA-256 is used, and an XXH3 digest can't be checked:
the error says what is missing. Shards of earlier formats have SHA-256.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, BinaryIO

from hpc.errors import UserError

try:
    import xxhash
except ImportError:  # no wheel for this platform, and no compiler to build it
    xxhash = None  # type: ignore[assignment]

FAST = "xxh3-128"
PREFERRED = "sha256" if xxhash is None else FAST
CHUNK_BYTES = 1 << 20
"""Read at once; stays in a processor's cache until it is hashed."""


class DigestError(UserError, ValueError):
    """A digest of an algorithm that this installation doesn't have."""


class Hasher:
    """Feeds bytes, tells the digest."""

    def __init__(self, algorithm: str = PREFERRED) -> None:
        self._algorithm = algorithm
        self._state = _state(algorithm)

    def update(self, data: "bytes | memoryview") -> None:
        self._state.update(data)

    def digest(self) -> str:
        """`algorithm:hexadecimal`."""
        return f"{self._algorithm}:{self._state.hexdigest()}"


def digest_of(parts: "Iterable[bytes | memoryview]") -> str:
    """Digest of the parts, one after another."""
    hasher = Hasher()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def file_digest(stream: BinaryIO, *, like: str) -> str:
    """Digest of what the stream still holds, by the algorithm of `like`. Raises DigestError."""
    hasher = Hasher(like.partition(":")[0])
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    while size := stream.readinto(buffer):  # type: ignore[attr-defined]
        hasher.update(view[:size])
    return hasher.digest()


def _state(algorithm: str) -> Any:
    if algorithm == "sha256":
        return hashlib.sha256()
    if algorithm != FAST:
        raise DigestError(f"digest of algorithm {algorithm!r} is unknown; upgrade prorl-hpc")
    if xxhash is None:
        raise DigestError("shards of this run have XXH3 digests; `pip install xxhash`")
    return xxhash.xxh3_128()
