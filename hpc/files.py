"""Atomic, durable writes and the way to packaged files. Knows nothing of jobs or learning."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

ASSETS = ("recipes", "slurm_templates", "singularity")


def sync_directory(path: Path) -> None:
    """Makes renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def append_line(path: Path, *, line: bytes, mode: int = 0o644) -> None:
    """Appends one line durably with a single write, so that writers of several hosts don't mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
    try:
        os.write(descriptor, line.rstrip(b"\n") + b"\n")
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
