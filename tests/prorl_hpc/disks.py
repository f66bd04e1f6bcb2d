"""A file system that is small and really full, where the tests may mount one."""

import errno
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, *, mib: int) -> Iterator[Path]:
    """Mounts a file system of so many MiB at `path`; skips the test where that isn't allowed."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill_disk(path: Path, *, spare_bytes: int) -> None:
    """Makes a file of all the room that is left but so much."""
    with path.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(b"x" * 4096)
        except OSError as err:
            assert err.errno == errno.ENOSPC
        stream.truncate(path.stat().st_size - spare_bytes)
