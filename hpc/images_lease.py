"""One builder at a time, on any shared file system: a lease file with a heartbeat.

Needs neither flock (refused by some Lustre and NFS mounts) nor synchronous clocks: ages are
compared on the file system's own clock. Knows nothing of images.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from hpc.errors import ImageError

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
POLL_SECONDS = 0.2


@contextlib.contextmanager
def lease(
    path: Path, *, wait_seconds: float, stale_seconds: float = STALE_SECONDS
) -> Iterator[None]:
    """Holds `path` for the body; waits for another holder, and takes over from a dead one.

    Raises ImageError when it isn't to be had within `wait_seconds`.
    """
    holder = f"{socket.gethostname()} pid {os.getpid()} {secrets.token_hex(6)}"
    end = time.monotonic() + wait_seconds
    while not _take(path, holder):
        if _age_seconds(path) > stale_seconds:
            _break(path, stale_seconds)
            continue
        if time.monotonic() > end:
            raise ImageError(
                f"lease {path} is held by {_holder(path)} for more than {wait_seconds:g} s; "
                "wait for that build, or remove the file if its host is gone"
            )
        time.sleep(POLL_SECONDS)
    stop = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, holder, stop), daemon=True)
    beat.start()
    try:
        yield
    finally:
        stop.set()
        beat.join()
        if _holder(path) == holder:
            path.unlink(missing_ok=True)


def is_held(path: Path, *, stale_seconds: float = STALE_SECONDS) -> bool:
    """Whether a living builder holds it."""
    return path.exists() and _age_seconds(path) <= stale_seconds


def _take(path: Path, holder: str) -> bool:
    # a link appears whole, with its content, or not at all
    own = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    own.write_text(holder)
    try:
        os.link(own, path)
    except FileExistsError:
        return False
    finally:
        own.unlink()
    return True


def _break(path: Path, stale_seconds: float) -> None:
    """Moves a stale lease away; of many that try, one moves it and the others find it gone."""
    grave = path.with_name(f".{path.name}.{secrets.token_hex(6)}.stale")
    try:
        path.rename(grave)
    except FileNotFoundError:
        return
    if _age_seconds(grave) <= stale_seconds:
        # somebody broke and took it between our look and our rename: give it back
        with contextlib.suppress(FileExistsError):
            os.link(grave, path)
    grave.unlink(missing_ok=True)


def _beat(path: Path, holder: str, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_SECONDS):
        if _holder(path) == holder:
            with contextlib.suppress(OSError):
                os.utime(path)


def _holder(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _age_seconds(path: Path) -> float:
    probe = path.with_name(f".{path.name}.{secrets.token_hex(6)}.now")
    try:
        written = path.stat().st_mtime
        probe.touch()
        return probe.stat().st_mtime - written
    except FileNotFoundError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)
