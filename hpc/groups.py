"""Process groups of one machine: signals to owned groups, and a guardian that outlives its owner.

Knows no jobs. Only groups that were handed over are ever touched, by id and start time.
"""

import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStat:
    """What /proc says of a process."""

    state: str
    group: int
    start_ticks: int


def stat(pid: int) -> ProcessStat | None:
    """State, group and start time of a process; None when it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessStat(state=fields[0], group=int(fields[2]), start_ticks=int(fields[19]))


def members(group: int) -> list[int]:
    """Living processes of a group (zombies are dead)."""
    found = []
    for path in _PROC.iterdir():
        known = stat(int(path.name)) if path.name.isdigit() else None
        if known is not None and known.group == group and known.state not in "ZX":
            found.append(int(path.name))
    return found


def kill_group(group: int, *, number: signal.Signals) -> None:
    """Signals every process of an owned group; a group that is gone is no error."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


@dataclass(frozen=True, kw_only=True, slots=True)
class Guardian:
    """The owner's end of the pipe to the guardian process."""

    pid: int
    pipe: int

    def add(self, group: int) -> None:
        """Hands over a group whose leader was just started."""
        known = stat(group)
        os.write(self.pipe, f"+{group} {known.start_ticks if known else 0}\n".encode())

    def remove(self, group: int) -> None:
        """Takes back a group that has ended."""
        os.write(self.pipe, f"-{group} 0\n".encode())

    def dismiss(self) -> None:
        """Ends the guardian once no group is left."""
        os.close(self.pipe)
        os.waitpid(self.pid, 0)


def start_guardian(*, grace_seconds: float) -> Guardian:
    """Forks the guardian: when the caller dies, it ends all groups that were handed over.

    File locks of the caller stay held by the guardian until it has done so. Call it while the
    process has one thread.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reader)
        return Guardian(pid=pid, pipe=writer)
    try:
        os.close(writer)
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        _end_all(_watch(reader), grace_seconds=grace_seconds)
    finally:
        os._exit(0)


def _watch(reader: int) -> dict[int, int]:
    """Follows the owner until it is gone; returns the groups that it still had."""
    groups: dict[int, int] = {}
    buffer = b""
    while data := os.read(reader, 65536):
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            group, ticks = (int(part) for part in line[1:].split())
            if line.startswith(b"+"):
                groups[group] = ticks
            else:
                groups.pop(group, None)
    return groups


def _end_all(groups: dict[int, int], *, grace_seconds: float) -> None:
    """SIGTERM to the leaders, which pass it on; SIGKILL to what is left after the grace time.

    What a leader that has ended left behind is not waited for.
    """
    for group, ticks in groups.items():
        known = stat(group)
        if known is not None and known.start_ticks == ticks:
            os.kill(group, signal.SIGTERM)
    until = time.monotonic() + grace_seconds
    left = [group for group in groups if members(group)]
    while left and time.monotonic() < until:
        for group in left:
            if group not in members(group):
                kill_group(group, number=signal.SIGKILL)
        select.select([], [], [], 0.2)
        left = [group for group in left if members(group)]
    for group in left:
        kill_group(group, number=signal.SIGKILL)
