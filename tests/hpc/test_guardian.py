"""The guardian ends what its owner left, without waiting for what leaders left behind."""

import subprocess
import sys
import time

from hpc.groups import members

OWNER = """
import os, subprocess, sys
from hpc.groups import start_guardian
guardian = start_guardian(grace_seconds=10_000)
child = subprocess.Popen(["bash", "-c", "sleep 9999 & wait"], start_new_session=True)
guardian.add(child.pid)
print(guardian.pid, child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_leftovers_of_an_ended_leader_are_killed_at_once() -> None:
    # bash dies of SIGTERM at once; its background process knows nothing of it.
    done = subprocess.run(
        [sys.executable, "-c", OWNER], capture_output=True, text=True, timeout=300
    )
    guardian, child = (int(word) for word in done.stdout.split())
    until = time.monotonic() + 300
    while members(guardian) or members(child):
        assert time.monotonic() < until, (members(guardian), members(child))
        time.sleep(0.05)
