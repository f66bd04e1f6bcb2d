"""Bounded commands and bounded waits, shared by the modules beside it."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

BOOT_SECONDS = 300


class ClusterError(RuntimeError):
    """The cluster could not be started; the message says which part and shows its log."""


def run(argv: list[str], *, env: dict[str, str] | None = None, check: bool = True) -> str:
    done = subprocess.run(
        argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    if check and done.returncode != 0:
        raise ClusterError(f"{argv[0]} failed ({done.returncode}): {done.stderr.strip()[-600:]}")
    return done.stdout


def wait_until(what: str, ready: Callable[[], bool], *, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-1500:] if log.exists() else "(no log)"
            raise ClusterError(f"{what} not within {seconds:.0f} s; {log} ends with:\n{tail}")
        time.sleep(0.1)
