"""Node-local directories of jobs and commands, and the sweeping after those that were killed.

    BASE/prorl-UID/RUN-JOB-INDEX/ATTEMPT     of a job's attempt; ATTEMPT.owner beside it says whose
    $TMPDIR/prorl-KIND-TOKEN/                of a command, its `lock` held while the process lives

Whoever makes a directory first removes those whose owner is gone. Knows no job and no environment.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from hpc.errors import UserError
from hpc.groups import stat

LATE_SECONDS = 3600.0
"""So long after its walltime a job is certainly gone."""

CACHES = {
    "CUDA_CACHE_PATH": "cuda",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
}
"""Where compiled kernels are kept: by default under $HOME or /tmp, whose quotas they fill."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Whose an attempt's directory is: a process of this node, or a job that has a deadline."""

    pid: int | None
    """The job's script; None on the further nodes of a job, where nothing lives all the time."""
    start_ticks: int
    deadline: float | None
    """Unix seconds."""

    def is_gone(self, now: float) -> bool:
        if self.pid is None:
            return self.deadline is not None and self.deadline + LATE_SECONDS < now
        known = stat(self.pid)
        return known is None or known.state in "ZX" or known.start_ticks != self.start_ticks


def owner(pid: int | None, *, deadline: float | None) -> Owner:
    """The owner that the process `pid`, or a job with that deadline, is."""
    known = None if pid is None else stat(pid)
    if known is None:
        return Owner(pid=None, start_ticks=0, deadline=deadline)
    return Owner(pid=pid, start_ticks=known.start_ticks, deadline=deadline)


def attempt_directory(
    base: Path, *, run: Path, job: str, index: int, attempt: int, temporary: str
) -> Path:
    """Directory of an attempt, below `temporary` ($TMPDIR) where that exists on this node."""
    usable = temporary and os.access(temporary, os.W_OK | os.X_OK)
    key = hashlib.sha256(os.fsencode(run)).hexdigest()[:12]
    place = Path(temporary) if usable else base
    return place / f"prorl-{os.getuid()}" / f"{key}-{job}-{index}" / str(attempt)


def caches(scratch: Path, *, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that send programs' caches to `scratch`; none that the site or the user has set."""
    return {
        name: str(scratch / "cache" / directory)
        for name, directory in CACHES.items()
        if not environment.get(name)
    }


def make_scratch(scratch: Path, *, owner: Owner, now: float) -> None:
    """Makes `scratch` for the user alone, and removes what dead attempts left on this node.

    Raises UserError where the user's directory is somebody else's, OSError where it can't be made.
    """
    user_directory = scratch.parent.parent
    user_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if user_directory.is_symlink() or user_directory.stat().st_uid != os.getuid():
        raise UserError(f"{user_directory} belongs to someone else; set site.scratch or TMPDIR")
    _sweep(user_directory, now=now)
    _make(scratch)
    for old in scratch.parent.iterdir():
        if old.name.isdigit() and int(old.name) < int(scratch.name):
            remove_scratch(old)
    mark = _mark(scratch)
    if not mark.exists():  # the first node's knows more than its step
        mark.write_bytes(msgspec.json.encode(owner))


def remove_scratch(scratch: Path) -> None:
    """Removes an attempt's directory, and that of its index when it was the last one."""
    shutil.rmtree(scratch, ignore_errors=True)
    with contextlib.suppress(OSError):
        _mark(scratch).unlink(missing_ok=True)
        scratch.parent.rmdir()


def _make(scratch: Path) -> None:
    """The attempt's directory; the end of the attempt before may just remove the one above it."""
    for is_last in (False, False, True):
        try:
            scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileNotFoundError:
            if is_last:
                raise
        else:
            return


def _mark(scratch: Path) -> Path:
    return scratch.with_name(f"{scratch.name}.owner")


def _sweep(user_directory: Path, *, now: float) -> None:
    for mark in _marks(user_directory):
        try:
            found = msgspec.json.decode(mark.read_bytes(), type=Owner)
        except (OSError, msgspec.DecodeError):  # being written or removed just now
            continue
        if found.is_gone(now):
            remove_scratch(mark.with_name(mark.name.removesuffix(".owner")))


def _marks(user_directory: Path) -> Iterator[Path]:
    """All marks; other jobs make and remove directories meanwhile, where `glob` would raise."""
    for index_directory in list(user_directory.iterdir()):
        with contextlib.suppress(OSError):
            yield from [path for path in index_directory.iterdir() if path.suffix == ".owner"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedDirectory:
    """A temporary directory that the next command removes if this process can't."""

    path: Path
    lock: int

    @classmethod
    def make(cls, kind: str, *, directory: Path | None = None) -> Self:
        """Sweeps what dead processes left, and makes one. Raises OSError."""
        place = Path(tempfile.gettempdir()) if directory is None else directory
        for left in _abandoned(place):
            shutil.rmtree(left, ignore_errors=True)
        hidden = Path(tempfile.mkdtemp(prefix=".prorl-new-", dir=place))
        lock = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # no locks here: nobody will sweep it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path = place / f"prorl-{kind}-{secrets.token_hex(4)}"
        hidden.rename(path)
        return cls(path=path, lock=lock)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self.lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _abandoned(place: Path) -> Iterator[Path]:
    """Directories of `OwnedDirectory` in `place` whose process is gone."""
    for path in place.glob("prorl-*-*"):
        try:
            if path.is_symlink() or path.lstat().st_uid != os.getuid():
                continue
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or not one of ours
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        finally:
            os.close(lock)
        yield path
