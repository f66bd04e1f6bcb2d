"""Freed memory is kept for what comes next."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from hpc.memory import keep_freed_memory

if sys.argv[1] == "keep" and not keep_freed_memory(64 << 20):
    sys.exit("no mallopt")
data = bytes(256 << 10)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(200):
    copies = [bytearray(data) for _ in range(8)]
    del copies
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=300
    )
    if "no mallopt" in done.stderr:
        pytest.skip("this C library has no mallopt")
    return int(done.stdout)


def test_kept_memory_does_not_come_from_the_kernel_again() -> None:
    # 8 buffers of 64 pages, once; without it, most of them again in each of 200 rounds.
    assert faults("keep") < 8 * 64 * 4 < faults("as it is")
