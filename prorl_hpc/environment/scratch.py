"""Node-local directories of a worker's environments, and the cleaning up after dead workers.

    root/                       0700, ours
      worker-<token>/lock       held with flock while the worker lives
      worker-<token>/<env>/     pid, layer/ (writable layer), in/ (read-only inside), out/

Knows which worker owns what; knows nothing of commands or runtimes' flags.
"""

import fcntl
import os
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from prorl_hpc.environment import processes
from prorl_hpc.environment.base import SandboxStartError

ABANDONED_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scratch:
    """The directories of one environment."""

    token: str
    path: Path

    @property
    def layer(self) -> Path:
        """The writable layer, or the copied directories."""
        return self.path / "layer"

    @property
    def inbox(self) -> Path:
        """Files on their way in; the sandbox sees it read-only."""
        return self.path / "in"

    @property
    def outbox(self) -> Path:
        """Files on their way out; the sandbox may write anything here, so nothing is trusted."""
        return self.path / "out"


class WorkerScratch:
    """All scratch of one worker process, with the reaper that outlives it."""

    def __init__(self, root: Path) -> None:
        """Makes `root`, cleans what dead workers left in it, and claims a directory of its own.

        Raises SandboxStartError when the place is full, foreign or not writable.
        """
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            owner = root.lstat().st_uid
            if root.is_symlink() or owner != os.geteuid():
                raise SandboxStartError(
                    f"scratch {root} belongs to uid {owner} or is a link; choose a directory of "
                    "your own on node-local disk"
                )
            root = root.resolve()
            clean_leftovers(root)
            self._lock, self.path = _claim(root)
        except OSError as err:
            if isinstance(err, SandboxStartError):
                raise
            raise SandboxStartError(f"scratch {root} can't be used: {err.strerror}") from err
        self._reaper: subprocess.Popen[bytes] | None = None

    def open(self) -> Scratch:
        """Directories for one environment, known to the reaper before anything runs in them."""
        token = f"{self.path.name.removeprefix('worker-')}-{secrets.token_hex(6)}"
        scratch = Scratch(token=token, path=self.path / token)
        self._tell(f"open {token} {scratch.path}")
        try:
            scratch.path.mkdir(mode=0o700)
            for directory in (scratch.layer, scratch.inbox, scratch.outbox):
                directory.mkdir(mode=0o700)
        except OSError as err:
            raise SandboxStartError(
                f"scratch {scratch.path} can't be made: {err.strerror}"
            ) from err
        return scratch

    def release(self, scratch: Scratch) -> None:
        """Removes the directories of an environment that has ended."""
        processes.remove_scratch(scratch.path)
        self._tell(f"close {scratch.token}")

    def close(self) -> None:
        """Ends the reaper and removes everything of this worker."""
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            try:
                self._reaper.wait(timeout=30.0)
            except subprocess.TimeoutExpired:
                self._reaper.kill()
                self._reaper.wait()
            self._reaper = None
        processes.remove_tree(self.path)
        os.close(self._lock)

    def _tell(self, line: str) -> None:
        if self._reaper is None or self._reaper.poll() is not None:
            # a session of its own: a signal to the worker's group must not reach it
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", processes.__file__, str(os.getpid())],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True, cwd="/",
            )  # fmt: skip
            lines = [f"open {entry.name} {entry}" for entry in self._open_directories()]
            self._write("".join(f"{text}\n" for text in lines))
        self._write(f"{line}\n")

    def _open_directories(self) -> list[Path]:
        return [entry for entry in self.path.iterdir() if entry.is_dir()]

    def _write(self, text: str) -> None:
        if self._reaper is not None and self._reaper.stdin is not None:
            try:
                os.write(self._reaper.stdin.fileno(), os.fsencode(text))
            except BrokenPipeError:
                return  # it was killed: the next line starts another one


def _claim(root: Path) -> tuple[int, Path]:
    """A directory that is locked before cleaners can see its name."""
    token = secrets.token_hex(6)
    hidden = root / f".new-{token}"
    hidden.mkdir(mode=0o700)
    lock = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    path = root / f"worker-{token}"
    hidden.rename(path)
    return lock, path


def clean_leftovers(root: Path) -> list[str]:
    """Ends and removes what workers that are no more left under `root`; returns their names."""
    cleaned = []
    for directory in sorted(root.iterdir()):
        if directory.name.startswith(".new-"):
            if directory.lstat().st_mtime < time.time() - ABANDONED_SECONDS:
                processes.remove_tree(directory)
            continue
        if not directory.name.startswith("worker-") or directory.is_symlink():
            continue
        if _is_dead(directory):
            for entry in directory.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    processes.end_sandbox(entry, token=entry.name)
                    processes.remove_groups(entry)
            processes.remove_tree(directory)
            cleaned.append(directory.name)
    return cleaned


def _is_dead(directory: Path) -> bool:
    try:
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return directory.exists()  # half removed: go on with it
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
