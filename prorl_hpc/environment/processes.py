"""Process trees seen through /proc, and the reaper that outlives a killed worker.

Knows process ids, namespaces and signals; knows nothing of shells, images or commands. Kills only
what descends from a sandbox, is of its session, or carries its token in the environment. Run as a
script (standard library alone) it is the reaper:

    worker ──pipe── reaper          lines: "open <token> <scratch>" | "close <token>"
       │ dies (kill -9): pipe ends
       ✗              reaper: kill every tree whose token is open, remove its scratch, exit
"""

import contextlib
import os
import select
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

TOKEN_VARIABLE = "PRORL_SANDBOX"  # noqa: S105 - the name of a variable
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PROC = Path("/proc")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PID_FILE = "pid"
"""Written inside the scratch by the sandbox's first process about itself, before it becomes the
runtime: no moment exists at which it runs and isn't known."""

GROUPS_FILE = "groups"
"""Inside the scratch: the sandbox's control groups, one directory a line."""


@dataclass(frozen=True)
class ProcessInfo:
    """One line of the process table."""

    pid: int
    parent: int
    session: int
    state: str
    started: float
    """Seconds since the epoch."""
    resident_bytes: int

    @property
    def alive(self) -> bool:
        """Zombies hold no memory and run nothing: they don't count."""
        return self.state not in "ZX"


def snapshot() -> dict[int, ProcessInfo]:
    """The process table, as far as this user may read it."""
    table = {}
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    for entry in os.scandir(PROC):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = Path(entry.path, "stat").read_bytes()
            # the name is in parentheses and may itself hold spaces and parentheses
            fields = text[text.rindex(b")") + 2 :].split()
            pid = int(entry.name)
            table[pid] = ProcessInfo(
                pid=pid,
                parent=int(fields[1]),
                session=int(fields[3]),
                state=fields[0].decode(),
                started=booted + int(fields[19]) / TICKS_PER_SECOND,
                resident_bytes=int(fields[21]) * PAGE_BYTES,
            )
    return table


def descendants(roots: Iterable[int], table: dict[int, ProcessInfo]) -> list[int]:
    """`roots` that are in the table, and everything below them, parents first."""
    children: dict[int, list[int]] = {}
    for info in table.values():
        children.setdefault(info.parent, []).append(info.pid)
    found = [pid for pid in dict.fromkeys(roots) if pid in table]
    seen = set(found)
    for pid in found:
        new = [child for child in children.get(pid, ()) if child not in seen]
        seen.update(new)
        found.extend(new)
    return found


def namespace_pids(pid: int) -> tuple[int, ...]:
    """The ids of `pid` from our PID namespace inwards; empty when it is gone."""
    try:
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return tuple(int(word) for word in line.split()[1:])
    except OSError:
        return ()
    return (pid,)


def holders_of(token: str) -> list[int]:
    """Processes that carry `token` in their initial environment."""
    needle = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    for entry in os.scandir(PROC):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def send(pid: int, number: int) -> bool:
    """Signals one process; False when it is gone or not ours."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_all(targets: Callable[[], list[int]], *, deadline_seconds: float) -> bool:
    """Freezes, then kills what `targets` lists, until it lists nothing. False at the deadline.

    Freezing first keeps a process that forks faster than we list from escaping for ever.
    """
    end = time.monotonic() + deadline_seconds
    while time.monotonic() < end:
        frozen: set[int] = set()
        while time.monotonic() < end:
            fresh = [pid for pid in targets() if pid not in frozen]
            if not fresh:
                break
            frozen.update(pid for pid in fresh if send(pid, signal.SIGSTOP) or True)
        if not frozen:
            return True
        for pid in frozen:
            send(pid, signal.SIGKILL)
        time.sleep(0.002)
    return not targets()


def namespace_inits(pids: Iterable[int]) -> list[int]:
    """Those of `pids` that are process 1 of a PID namespace below ours."""
    own = len(namespace_pids(os.getpid()))
    return [pid for pid in pids if len(inner := namespace_pids(pid)) > own and inner[-1] == 1]


def session_members(scratch: Path, table: dict[int, ProcessInfo]) -> list[int]:
    """Processes of the session that the sandbox of `scratch` opened; empty when it is over.

    The id may have been given to a stranger since: its leader must have started when the file was
    written, and without its leader a session counts only by what its members look like.
    """
    file = scratch / PID_FILE
    try:
        session, written = int(file.read_text()), file.stat().st_mtime
    except (OSError, ValueError):
        return []
    leader = table.get(session)
    members = [info.pid for info in table.values() if info.session == session]
    if leader is not None:
        return members if leader.started < written + 2.0 else []
    return [pid for pid in members if is_helper(pid)]


def is_helper(pid: int) -> bool:
    """A file-system helper of a container runtime that lost its parent."""
    try:
        return b"/mnt/session/" in (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False


def sandbox_members(scratch: Path, *, token: str) -> list[int]:
    """Every live process of one sandbox: runtime, helpers and payload."""
    table = snapshot()
    roots = [*session_members(scratch, table), *holders_of(token), *group_members(scratch)]
    # a payload that is found by its token alone hangs below its namespace's process 1
    for pid in namespace_inits(ancestors(roots, table)):
        roots.append(pid)
    pids = descendants(roots, table)
    return [pid for pid in pids if table[pid].alive and pid != os.getpid()]


def groups_of(scratch: Path) -> list[Path]:
    """The control groups of a sandbox; empty where it has none."""
    try:
        return [Path(line) for line in (scratch / GROUPS_FILE).read_text().splitlines()]
    except OSError:
        return []


def group_members(scratch: Path) -> list[int]:
    """Processes in the sandbox's control groups, whatever they did to their names and parents."""
    found: dict[int, None] = {}
    for group in groups_of(scratch):
        with contextlib.suppress(OSError, ValueError):
            found |= dict.fromkeys(map(int, (group / "cgroup.procs").read_text().split()))
    return [pid for pid in found if pid > 0]


def remove_groups(scratch: Path, *, deadline_seconds: float = 5.0) -> None:
    """Removes the empty control groups; what was killed leaves them a moment later."""
    end = time.monotonic() + deadline_seconds
    for group in groups_of(scratch):
        while group.is_dir():
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            if time.monotonic() > end:
                break
            time.sleep(0.01)


def ancestors(pids: Iterable[int], table: dict[int, ProcessInfo]) -> list[int]:
    """Everything above `pids`, without init."""
    found: dict[int, None] = {}
    for pid in pids:
        info = table.get(pid)
        while info is not None and info.parent > 1 and info.parent not in found:
            found[info.parent] = None
            info = table.get(info.parent)
    return list(found)


def end_sandbox(scratch: Path, *, token: str, grace_seconds: float = 5.0) -> bool:
    """Ends one sandbox: its namespace's process 1 first (the kernel then ends all the others and
    the runtime unmounts what it mounted), then whatever is left. True when nothing is left."""

    def members() -> list[int]:
        return sandbox_members(scratch, token=token)

    inits = namespace_inits(members())
    for pid in inits:
        send(pid, signal.SIGKILL)
    end = time.monotonic() + (grace_seconds if inits else 0.0)
    while time.monotonic() < end and members():
        time.sleep(0.01)
    return kill_all(members, deadline_seconds=grace_seconds)


def remove_scratch(path: Path) -> None:
    """Removes what an ended sandbox leaves: its control groups, then its directory."""
    remove_groups(path)
    remove_tree(path)


def remove_tree(path: Path) -> None:
    """Removes a directory, also one with directories that the agent made unreadable."""

    def unlock(_function: object, failed: str, _error: object) -> None:
        parent = Path(failed).parent
        for locked in (parent, Path(failed)):
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(locked.lstat().st_mode):
                    locked.chmod(0o700)
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(Path(failed).lstat().st_mode):
                shutil.rmtree(failed, ignore_errors=True)
            else:
                Path(failed).unlink()

    for _attempt in range(3):
        if not os.path.lexists(path):
            return
        shutil.rmtree(path, onerror=unlock)


def reap(descriptor: int, worker: int) -> None:
    """Reads records until the pipe ends or the worker is gone, then ends what is still open."""
    opened: dict[str, str] = {}
    buffer = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], 0.5)
        chunk = os.read(descriptor, 65536) if ready else b""
        buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            word, token, *rest = os.fsdecode(line).split(" ", 2)
            if word == "open":
                opened[token] = rest[0]
            else:
                opened.pop(token, None)
        if (ready and not chunk) or (not ready and os.getppid() != worker):
            break
    for token, scratch in opened.items():
        end_sandbox(Path(scratch), token=token)
        remove_scratch(Path(scratch))


def main(arguments: list[str]) -> int:
    """`python processes.py WORKER_PID`, records on standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # it ends with its worker, not before
    reap(0, int(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
