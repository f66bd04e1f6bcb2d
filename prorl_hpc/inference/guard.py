"""Runs one command and ends all of it when its owner is gone. Run as `python -m ... -- COMMAND`.

    owner --stdin--> guard (this, no heavy import) --> COMMAND, leader of a process group of its own

The pipe is the owner's life: when it closes, however the owner died, the group gets SIGTERM and,
after a grace time, SIGKILL. A server never outlives its job, and never keeps its memory.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from hpc.groups import kill_group, members

GRACE_SECONDS = 10.0
POLL_SECONDS = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the command's exit code, 128 + signal when it was killed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[arguments.index("--") + 1 :]
    asked: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, ask)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    while process.poll() is None and not asked and _owner_lives():
        pass
    end_group(process.pid, grace_seconds=GRACE_SECONDS, reap=process.poll)
    code = process.wait()
    return 128 - code if code < 0 else code


def _owner_lives() -> bool:
    """False once the pipe is closed; waits a moment for that."""
    try:
        readable, _, _ = select.select([0], [], [], POLL_SECONDS)
    except InterruptedError:
        return True
    return not readable or bool(os.read(0, 4096))


def end_group(group: int, *, grace_seconds: float, reap: object = None) -> None:
    """SIGTERM to an owned group, SIGKILL to what is left of it after the grace time."""
    kill_group(group, number=signal.SIGTERM)
    until = time.monotonic() + grace_seconds
    while members(group) and time.monotonic() < until:
        if callable(reap):
            reap()
        time.sleep(0.05)
    kill_group(group, number=signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
