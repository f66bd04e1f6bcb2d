"""How many environments start at the same time: per node, over all workers, and per image.

A place is an abstract Unix socket that is bound: the kernel gives it to one process at a time and
takes it back when that dies, and nothing lies on disk. The first start of an image goes alone: it
reads the image for all that follow. Knows nothing of what is started.
"""

import asyncio
import errno
import hashlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

POLL_SECONDS = 0.02


class StartGate:
    """One per worker and event loop; workers with the same `root` share the node's places."""

    def __init__(self, root: Path, *, num_places: int) -> None:
        if num_places < 1:
            raise ValueError(f"max_concurrent_starts={num_places} is below 1")
        key = hashlib.sha256(os.fsencode(root.absolute())).hexdigest()[:16]
        self._names = [f"\0prorl-start-{os.geteuid()}-{key}-{i}" for i in range(num_places)]
        self._own = asyncio.Semaphore(num_places)
        self._known: set[Path | None] = {None}
        self._first: dict[Path, asyncio.Lock] = {}

    @asynccontextmanager
    async def start(self, image: Path | None) -> AsyncIterator[None]:
        """Holds a place for the body; a start that raises leaves the image to the next one."""
        if image is None or image in self._known:
            async with self._place():
                yield
            return
        lock = self._first.setdefault(image, asyncio.Lock())
        async with lock:
            alone = image not in self._known
            if alone:
                async with self._place():
                    yield
                self._known.add(image)
        if not alone:
            async with self._place():
                yield

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        async with self._own:
            while (held := self._take()) is None:
                await asyncio.sleep(POLL_SECONDS)
            try:
                yield
            finally:
                held.close()

    def _take(self) -> socket.socket | None:
        for name in self._names:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                made.bind(name)
            except OSError as err:
                made.close()
                if err.errno != errno.EADDRINUSE:
                    raise
                continue
            return made
        return None
