"""Atomic, durable writes and the way to packaged files. Knows nothing of jobs or learning."""

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

RENAME_EXCHANGE = 2
"""Flag of Linux' renameat2: both names change their places in one step."""

MAX_VECTORS = 1024
"""Parts per system call (IOV_MAX)."""

ASSETS = ("recipes", "slurm_templates", "singularity")


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, 524)
"""What file systems without locks answer: some mounts of Lustre, NFS (37) and DVS (524)."""


def try_lock(descriptor: int) -> bool:
    """Takes an exclusive flock; False where another holds it. True, without one, where the file
    system has no locks. Raises OSError for anything else."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as err:
        if err.errno not in NO_LOCKS:
            raise
    return True


def sync_directory(path: Path) -> None:
    """Makes renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Makes the bytes of a file that somebody else wrote durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    """Writes all parts, one after another, without joining them first. Raises OSError."""
    rest: deque[bytes | memoryview] = deque(part for part in parts if len(part))
    while rest:
        written = os.writev(descriptor, list(islice(rest, MAX_VECTORS)))
        while rest and written >= len(rest[0]):
            written -= len(rest.popleft())
        if written:
            rest[0] = memoryview(rest[0])[written:]


def publish(path: Path, *, data: bytes, mode: int = 0o644) -> None:
    """Writes `data` so that `path` holds either the old bytes or all of the new ones.

    Raises OSError (ENOSPC, EACCES, ...) with nothing half-made left behind.
    """

    def write(temporary: Path) -> None:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())

    publish_with(path, write=write)


def publish_with(path: Path, *, write: Callable[[Path], None]) -> None:
    """Like `publish`, for writers that need a path: `write` makes the temporary file, durably."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        write(temporary)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def aside(target: Path) -> Path:
    """A hidden name beside `target` that nobody else has; `sweep` knows it again."""
    return target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")


def replace_directory(temporary: Path, target: Path) -> None:
    """Gives a finished, durable directory its name; one that has the name already goes.

    In one step where the kernel and the file system can exchange two names. Elsewhere the name is
    missing for the moment between two renames. Raises OSError with the old directory in place.
    """
    if not target.exists():
        temporary.rename(target)
        sync_directory(target.parent)
        return
    if _exchange(temporary, target):
        grave = temporary
    else:
        grave = aside(target)
        target.rename(grave)
        try:
            temporary.rename(target)
        except OSError:
            grave.rename(target)
            raise
    sync_directory(target.parent)
    # Removing may take long; by now the new one has the name.
    shutil.rmtree(grave, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names; False where that can't be done."""
    here = -100  # AT_FDCWD
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = (here, os.fsencode(one), here, os.fsencode(other))
    return bool(rename(*names, ctypes.c_uint(RENAME_EXCHANGE)) == 0)


def append_line(path: Path, *, line: bytes, mode: int = 0o644) -> None:
    """Appends one line durably with a single write, so that writers of several hosts don't mix."""
    data = line.rstrip(b"\n") + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
    try:
        written = os.write(descriptor, data)
        if written < len(data):
            # The next line, whoever writes it, mustn't be glued to this one.
            os.write(descriptor, b"\n")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def asset_directory(name: str) -> Path:
    """Directory of packaged files (`recipes`, `slurm_templates`, `singularity`).

    A wheel carries them in `prorl_hpc/_assets/`; a checkout has them at its top.
    Raises FileNotFoundError when neither exists.
    """
    if name not in ASSETS:
        raise ValueError(f"asset {name!r} is unknown; choose one of {', '.join(ASSETS)}")
    root = Path(__file__).resolve().parent.parent
    for candidate in (root / "prorl_hpc" / "_assets" / name, root / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"packaged directory {name!r} is missing; reinstall prorl-hpc")
