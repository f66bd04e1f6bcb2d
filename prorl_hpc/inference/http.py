"""Requests to one inference server, with errors sorted into `gone` and `refused`. Knows no engine.

An address is `http://host:port`, or `unix:/path` for a server of this machine behind a private
socket. httpx is imported lazily.
"""

import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from prorl_hpc.inference.engine import EngineError

CONNECT_SECONDS = 10.0
MAX_CONNECTIONS = 4096


class ServerGone(EngineError, ConnectionError):
    """The server didn't answer, or failed by itself: another one may serve the request."""


class RequestRefused(EngineError, ValueError):
    """The server understood and declined: no other one would take the request either."""


class Channel:
    """Connections to one server. Cancelling a request closes its connection, which aborts it."""

    def __init__(self, address: str, *, headers: dict[str, str] | None = None) -> None:
        import httpx

        logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of every request
        self.address = address
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=64)
        if address.startswith("unix:"):
            transport = httpx.AsyncHTTPTransport(uds=address.removeprefix("unix:"), limits=limits)
            base = "http://server"
        else:
            transport = httpx.AsyncHTTPTransport(limits=limits)
            base = address.rstrip("/")
        self._client = httpx.AsyncClient(
            transport=transport, base_url=base, headers=headers, trust_env=False
        )

    async def post(self, path: str, body: Any = None, *, timeout_seconds: float) -> bytes:
        """Sends JSON and returns the answer's bytes. Raises ServerGone or RequestRefused."""
        return await self._ask("POST", path, body, timeout_seconds=timeout_seconds)

    async def get(self, path: str, *, timeout_seconds: float) -> bytes:
        """Raises ServerGone or RequestRefused."""
        return await self._ask("GET", path, None, timeout_seconds=timeout_seconds)

    async def events(
        self, path: str, body: Any, *, timeout_seconds: float
    ) -> AsyncGenerator[bytes, None]:
        """Posts JSON and yields the data of each server-sent event, up to `[DONE]`.

        `timeout_seconds` bounds each wait for the next event. Raises ServerGone or RequestRefused;
        an end without `[DONE]` is ServerGone. Close it early to cancel.
        """
        timeout = self._timeout(timeout_seconds)
        with self._sorted_errors(path, timeout_seconds):
            async with self._client.stream("POST", path, json=body, timeout=timeout) as response:
                if response.status_code >= 300:
                    await response.aread()
                    raise self._error(path, response)
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    yield data.encode()
        raise ServerGone(f"{self.address}{path} ended its stream early")

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, method: str, path: str, body: Any, *, timeout_seconds: float) -> bytes:
        timeout = self._timeout(timeout_seconds)
        with self._sorted_errors(path, timeout_seconds):
            response = await self._client.request(method, path, json=body, timeout=timeout)
        if response.status_code >= 300:
            raise self._error(path, response)
        return bytes(response.content)

    def _timeout(self, seconds: float) -> Any:
        import httpx

        return httpx.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds))

    @contextmanager
    def _sorted_errors(self, path: str, timeout_seconds: float) -> Iterator[None]:
        """What httpx raises, as ServerGone."""
        import httpx

        try:
            yield
        except (ServerGone, RequestRefused):
            raise
        except httpx.TimeoutException as err:
            raise ServerGone(
                f"{self.address}{path} didn't answer within {timeout_seconds:g} s"
            ) from err
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError, OSError) as err:
            raise ServerGone(f"{self.address}{path}: {type(err).__name__}: {err}") from err

    def _error(self, path: str, response: Any) -> EngineError:
        """An answer that is none, as ServerGone or RequestRefused."""
        gone = response.status_code >= 500 or response.status_code in (408, 429)
        kind = ServerGone if gone else RequestRefused
        return kind(f"{self.address}{path} answered {_said(response)}")


def _said(response: Any) -> str:
    """Status and the first words of the body."""
    return f"{response.status_code}: {' '.join(response.text.split())[:300]}"
