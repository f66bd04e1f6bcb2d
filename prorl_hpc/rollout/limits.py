"""Time limits of episodes, which stand still while nobody can serve the policy. Knows no server.

The agent must not pay for the time in which there was no inference server to answer it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TimeLimits:
    """All limits that run in one event loop; paused and resumed together."""

    def __init__(self) -> None:
        self._left: dict[asyncio.Timeout, float] = {}
        """Seconds that each limit had left at the pause."""
        self._running: set[asyncio.Timeout] = set()
        self._paused_at: float | None = None
        self._before = 0.0

    @property
    def paused(self) -> bool:
        return self._paused_at is not None

    @property
    def paused_seconds(self) -> float:
        """How long all pauses together lasted so far."""
        if self._paused_at is None:
            return self._before
        return self._before + asyncio.get_running_loop().time() - self._paused_at

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """Like `asyncio.timeout`, without the time of pauses."""
        async with asyncio.timeout(None if self.paused else seconds) as limit:
            self._running.add(limit)
            if self.paused:
                self._left[limit] = seconds
            try:
                yield limit
            finally:
                self._running.discard(limit)
                self._left.pop(limit, None)

    def pause(self) -> None:
        """Stops the clock of every limit."""
        if self.paused:
            return
        now = asyncio.get_running_loop().time()
        self._paused_at = now
        for limit in self._running:
            until = limit.when()
            if until is not None and not limit.expired() and until > now:
                self._left[limit] = until - now
                limit.reschedule(None)

    def resume(self) -> None:
        """Lets the limits go on where they stood."""
        if self._paused_at is None:
            return
        now = asyncio.get_running_loop().time()
        self._before += now - self._paused_at
        self._paused_at = None
        for limit, seconds in self._left.items():
            limit.reschedule(now + seconds)
        self._left.clear()
