"""Tells a client's URL that its job is over: only at hosts that the operator named, a few times.

A service that posts wherever it is told would reach what its clients can't (other users' ports on
loopback, a cloud's metadata address). So nothing is allowed by default, hosts are compared as
written, redirects aren't followed and no answer is shown to the client. A call is a hint: the
result stays in the store, and a client that heard nothing asks.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from prorl_hpc.service.allowed import CallbackError, check_host
from prorl_hpc.service.schema import JobView

log = logging.getLogger("prorl_hpc.service")

ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 1.0
"""Doubled after each attempt."""

REQUEST_SECONDS = 10.0
MAX_PENDING = 1000
"""Calls under way; further ones are dropped and counted."""

_PORTS = {"http": 80, "https": 443}


class Callbacks:
    """Calls under way. One event loop."""

    def __init__(
        self, allowed: Iterable[str] = (), *, first_pause_seconds: float = FIRST_PAUSE_SECONDS
    ) -> None:
        """`allowed` are `HOST` (any port) or `HOST:PORT`. Raises CallbackError."""
        self._allowed = frozenset(check_host(text) for text in allowed)
        self._first_pause_seconds = first_pause_seconds
        self._client: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        """Calls by how they ended: `delivered`, `failed`, `dropped`."""

    def check(self, url: str) -> None:
        """Raises CallbackError for a URL that may not be called."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as err:
            raise CallbackError(f"callback_url={url[:200]!r} isn't a URL: {err}") from err
        host = (parts.hostname or "").lower()
        if parts.scheme not in _PORTS or not host or parts.username or parts.password:
            raise CallbackError(
                f"callback_url={url[:200]!r} must be http://HOST... or https://HOST... without a "
                "user"
            )
        places = {(host, None), (host, port or _PORTS[parts.scheme])}
        if not places & self._allowed:
            raise CallbackError(
                f"callbacks to {host[:100]!r} aren't allowed here; start the service with "
                "--callback-host HOST or HOST:PORT"
            )

    def notify(self, url: str, view: JobView) -> None:
        """Begins to call; returns at once."""
        if len(self._tasks) >= MAX_PENDING:
            self.counts["dropped"] += 1
            return
        task = asyncio.get_running_loop().create_task(self._call(url, view), name=f"call {view.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Gives up the calls under way."""
        self.counts["dropped"] += len(self._tasks)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def _call(self, url: str, view: JobView) -> None:
        pause = self._first_pause_seconds
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(pause)
                pause *= 2
            if await self._post(url, view):
                self.counts["delivered"] += 1
                return
        self.counts["failed"] += 1
        log.warning("callback of job %s failed %d times", view.id, ATTEMPTS)

    async def _post(self, url: str, view: JobView) -> bool:
        import httpx

        if self._client is None:
            self._client = httpx.AsyncClient(
                timeout=REQUEST_SECONDS, follow_redirects=False, trust_env=False
            )
        try:
            # Streamed: an endless answer isn't read.
            async with (
                asyncio.timeout(REQUEST_SECONDS),
                self._client.stream("POST", url, json=view.model_dump(mode="json")) as response,
            ):
                return bool(response.status_code < 300)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
            return False
