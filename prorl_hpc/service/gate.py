"""Who may ask, and how much: bearer token and body limit, before any route. Knows no route."""

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health",)


class Gate:
    """An ASGI layer around the application."""

    def __init__(self, app: Application, *, token: str | None, max_body_bytes: int) -> None:
        """Without a token everyone who can connect may ask (a private Unix socket)."""
        self._app = app
        self._token = token
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if not self._may(scope["path"], headers.get(b"authorization", b"")):
            await _refuse(send, 401, "the bearer token is missing or wrong")
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            await _refuse(send, 400, "Content-Length isn't a number")
            return
        if int(length) > self._max_body_bytes:
            await _refuse(send, 413, f"the body is over {self._max_body_bytes} bytes")
            return
        # Read whole before anything starts: a chunked body has no announced length.
        body = await self._body(receive)
        if body is None:
            await _refuse(send, 413, f"the body is over {self._max_body_bytes} bytes")
            return
        first = True

        async def replay() -> Message:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        await self._app(scope, replay, send)

    def _may(self, path: str, authorization: bytes) -> bool:
        if self._token is None or path in OPEN_PATHS:
            return True
        return hmac.compare_digest(authorization, b"Bearer " + self._token.encode())

    async def _body(self, receive: Receive) -> bytes | None:
        """The request's body; None when it is too long."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return b"".join(parts)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                return None
            if not message.get("more_body"):
                return b"".join(parts)


async def _refuse(send: Send, status: int, detail: str) -> None:
    body = json.dumps({"detail": detail, "error": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
