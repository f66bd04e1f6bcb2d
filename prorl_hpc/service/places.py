"""Places for samples at work, handed out by priority. Knows no job and no HTTP."""

import asyncio
import heapq
import itertools


class Places:
    """Places for samples at work; the waiter with the smallest key gets the next one."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.num_taken = 0
        self._waiters: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._count = itertools.count()

    async def acquire(self, priority: int, age: int) -> None:
        """Small priorities first, then small ages."""
        if self.num_taken < self._number:
            self.num_taken += 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (priority, age, next(self._count), future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release()  # it was handed over in the very moment of cancelling
            raise

    def release(self) -> None:
        """Hands the place to the next waiter, if any."""
        while self._waiters:
            *_, future = heapq.heappop(self._waiters)
            if not future.done():
                future.set_result(None)
                return
        self.num_taken -= 1
