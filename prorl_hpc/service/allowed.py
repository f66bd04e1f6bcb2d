"""Hosts that an operator allows to be called. Pure; imports no server."""

from urllib.parse import urlsplit

from hpc.errors import UserError


class CallbackError(UserError, ValueError):
    """A callback URL or an allowed host that can't be."""


def check_host(text: str) -> tuple[str, int | None]:
    """Host in small letters, and port (None: any). Raises CallbackError."""
    wrong = f"--callback-host {text!r} isn't HOST or HOST:PORT"
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as err:
        raise CallbackError(wrong) from err
    if not host or parts.netloc != text or "@" in text:
        raise CallbackError(wrong)
    return host.lower(), port
