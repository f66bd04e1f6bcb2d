"""One session at a Gym resources server: its cookies, its requests, each bounded. Knows no policy.

    POST /seed_session   POST /{tool}   POST /verify

Refused connections and overloaded servers are tried again, a few times; what remains is a
VerifierError. A tool's call is sent again only where it certainly wasn't made: it may change what
the session holds. httpx is imported lazily.
"""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import msgspec

from prorl_hpc.tasks.base import VerifierError

ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.5
"""Doubled after each attempt."""

MAX_ANSWER_BYTES = 64 << 20
OVERLOADED = (408, 425, 429, 502, 503, 504)
TURNED_AWAY = (425, 429, 503)
"""Those of a server that didn't begin; behind the others a request may have been carried out."""


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of an answer to /verify."""

    reward: Any
    reward_components: dict[str, Any] | None = None
    mask_sample: bool = False
    failure_kind: str | None = None
    failure_reason: str | None = None


class ServerSession:
    """Requests that share cookies."""

    def __init__(self, url: str, *, first_pause_seconds: float = FIRST_PAUSE_SECONDS) -> None:
        import httpx

        self._url = url
        self._first_pause_seconds = first_pause_seconds
        # Made once per process: reading the certificates takes longer than a request.
        verify = _tls() if url.startswith("https:") else False
        self._client = httpx.AsyncClient(
            base_url=url, transport=httpx.AsyncHTTPTransport(verify=verify), trust_env=False
        )

    async def seed(self, row: dict[str, Any], *, timeout_seconds: float) -> None:
        """Begins the session. Raises VerifierError."""
        await self._sure("/seed_session", row, timeout_seconds=timeout_seconds)

    async def verify(self, body: dict[str, Any], *, timeout_seconds: float) -> Verified:
        """Raises VerifierError, also for an answer that isn't one."""
        data = await self._sure("/verify", body, timeout_seconds=timeout_seconds)
        try:
            return msgspec.json.decode(data, type=Verified)
        except msgspec.DecodeError as err:
            raise VerifierError(f"{self._url}/verify answered something else: {err}") from err

    async def call(self, name: str, arguments: object, *, timeout_seconds: float) -> str:
        """A tool's answer, its complaints included: the policy is to read them."""
        status, data = await self._post(
            f"/{name}", arguments, timeout_seconds=timeout_seconds, once=True
        )
        text = data.decode(errors="replace")
        if status in OVERLOADED:
            raise VerifierError(f"{self._url}/{name} answered {status}: {_words(text)}")
        return text

    async def close(self) -> None:
        await self._client.aclose()

    async def _sure(self, path: str, body: object, *, timeout_seconds: float) -> bytes:
        status, data = await self._post(path, body, timeout_seconds=timeout_seconds)
        if status >= 300:
            words = _words(data.decode(errors="replace"))
            raise VerifierError(f"{self._url}{path} answered {status}: {words}")
        return data

    async def _post(
        self, path: str, body: object, *, timeout_seconds: float, once: bool = False
    ) -> tuple[int, bytes]:
        """Status and body; all attempts together take at most `timeout_seconds`.

        `once`: it is never carried out twice.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._attempts(path, body, once=once)
        except TimeoutError as err:
            raise VerifierError(
                f"{self._url}{path} didn't answer within {timeout_seconds:g} s"
            ) from err

    async def _attempts(self, path: str, body: object, *, once: bool) -> tuple[int, bytes]:
        import httpx

        undone = TURNED_AWAY if once else OVERLOADED
        pause = self._first_pause_seconds
        content = msgspec.json.encode(body)
        for attempt in range(ATTEMPTS):
            last = attempt == ATTEMPTS - 1
            try:
                status, data = await self._once(path, content)
                if last or status not in undone:
                    return status, data
            except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError) as err:
                if last or (once and not isinstance(err, httpx.ConnectError)):
                    raise VerifierError(f"{self._url}{path}: {_reason(err)}") from err
            except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as err:
                raise VerifierError(f"{self._url}{path}: {_reason(err)}") from err
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, path: str, content: bytes) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        # Its time is bounded above, together with the attempts.
        async with self._client.stream(
            "POST", path, content=content, headers=headers, timeout=None
        ) as response:
            parts: list[bytes] = []
            size = 0
            async for part in response.aiter_bytes():
                parts.append(part)
                size += len(part)
                if size > MAX_ANSWER_BYTES:
                    raise VerifierError(f"{self._url}{path} answered over {MAX_ANSWER_BYTES} bytes")
            return response.status_code, b"".join(parts)


Connect = Callable[[str], ServerSession]


@functools.cache
def _tls() -> Any:
    import ssl

    return ssl.create_default_context()


def _reason(err: Exception) -> str:
    return f"{type(err).__name__}: {err}"


def _words(text: str) -> str:
    return " ".join(text.split())[:300]
