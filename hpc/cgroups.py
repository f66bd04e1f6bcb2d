"""Control groups that this user may make: where, and how a sandbox's limits are set in one.

Knows the files of cgroup v1 and v2 and the scopes of a systemd user manager; knows nothing of
sandboxes. Only groups that were delegated are used: a directory counts when this user can make a
group in it, set both limits and put a process there, which `probe_place` tries.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RUNTIME_BYTES = 96 << 20
"""Beside the agent's own: the container runtime and its file-system helpers."""

CONTROLLERS = ("memory", "pids")
TRIAL_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlace:
    """Where groups can be made."""

    version: int
    """1: one directory per controller; 2: one for all."""
    directories: tuple[Path, ...]
    """Parents of the groups: (memory, pids), or the one of version 2."""

    @property
    def name(self) -> str:
        """As trajectories record it."""
        return f"cgroup-v{self.version}"


def find_places(memberships: str, mounts: str) -> list[GroupPlace]:
    """Candidates from /proc/self/cgroup and /proc/self/mountinfo, the nearest first. Pure.

    In version 1 only below the process's own group: further up, the limits of its job wouldn't
    hold. In version 2 processes and controllers can't share a group, so parents count too; a site
    that owns them doesn't let users write there.
    """
    own = {}
    for line in memberships.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            own[name] = path
    found = []
    unified, controllers = _mount_points(mounts)
    if "" in own and unified is not None:
        group = _below(unified, own[""])
        root = Path(unified[1])
        for directory in [group, *group.parents]:
            if directory.is_relative_to(root):
                found.append(GroupPlace(version=2, directories=(directory,)))
    if all(name in own and name in controllers for name in CONTROLLERS):
        directories = tuple(_below(controllers[name], own[name]) for name in CONTROLLERS)
        found.append(GroupPlace(version=1, directories=directories))
    return found


def _mount_points(mounts: str) -> tuple[tuple[str, str] | None, dict[str, tuple[str, str]]]:
    """(root inside the hierarchy, where it is mounted) of version 2, and of each v1 controller."""
    unified: tuple[str, str] | None = None
    controllers: dict[str, tuple[str, str]] = {}
    for line in mounts.splitlines():
        words = line.split(" ")
        if "-" not in words:
            continue
        kind, _, options = words[words.index("-") + 1 :][:3]
        place = (words[3], words[4].replace("\\040", " "))
        if kind == "cgroup2":
            unified = unified or place
        elif kind == "cgroup":
            for name in options.split(","):
                controllers.setdefault(name, place)
    return unified, controllers


def _below(mount: tuple[str, str], path: str) -> Path:
    root, point = mount
    inside = path.removeprefix(root) if root != "/" and path.startswith(root) else path
    return Path(point) / inside.strip("/")


def probe_place() -> GroupPlace | None:
    """The first place that works, by trying it; None where nothing is delegated."""
    try:
        memberships = Path("/proc/self/cgroup").read_text()
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return None
    return next((p for p in find_places(memberships, mounts) if works(p)), None)


def works(place: GroupPlace) -> bool:
    """Makes a group, sets its limits, runs a process in it and removes it."""
    groups = group_paths(place, f"prorl-probe-{secrets.token_hex(4)}")
    try:
        make_group(place, groups, memory_bytes=64 << 20, num_processes=8)
        argv = ["/bin/sh", "-c", enter_script(), "sh", *map(str, groups), "--", "true"]
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRIAL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        for group in groups:
            with contextlib.suppress(OSError):
                group.rmdir()
    return done.returncode == 0


def group_paths(place: GroupPlace, name: str) -> tuple[Path, ...]:
    """The directories of the group of that name."""
    return tuple(directory / name for directory in place.directories)


def make_group(
    place: GroupPlace, groups: Sequence[Path], *, memory_bytes: int, num_processes: int
) -> None:
    """Makes the directories and sets the limits. Raises OSError; then nothing is left."""
    most = str(memory_bytes + RUNTIME_BYTES)
    made: list[Path] = []
    try:
        for group in groups:
            group.mkdir()
            made.append(group)
        if place.version == 2:
            (group,) = groups
            (group / "memory.max").write_text(most)
            _try_write(group / "memory.swap.max", "0")
            (group / "pids.max").write_text(str(num_processes))
        else:
            memory, pids = groups
            (memory / "memory.limit_in_bytes").write_text(most)
            _try_write(memory / "memory.memsw.limit_in_bytes", most)
            (pids / "pids.max").write_text(str(num_processes))
    except OSError:
        for group in made:
            with contextlib.suppress(OSError):
                group.rmdir()
        raise


def enter_script() -> str:
    """A POSIX script: `sh -c SCRIPT sh GROUP... -- COMMAND...` enters the groups, then executes."""
    return (
        'while [ "$1" != -- ]; do echo 0 >"$1/cgroup.procs" || exit 125; shift; done; '
        'shift; exec "$@"'
    )


def num_oom_kills(groups: Sequence[Path]) -> int:
    """Processes that the kernel killed in the group for its memory limit, so far."""
    for group in groups:
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                for line in (group / name).read_text().splitlines():
                    word, _, value = line.partition(" ")
                    if word == "oom_kill":
                        return int(value)
    return 0


def _try_write(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):  # without swap accounting the file isn't there
        path.write_text(text)


def find_scope_runner(environment: Mapping[str, str] = os.environ) -> str | None:
    """`systemd-run` when this user's own manager starts scopes with limits; else None."""
    path = shutil.which("systemd-run")
    if path is None or "XDG_RUNTIME_DIR" not in environment:
        return None
    try:
        done = subprocess.run(
            [*scope_argv(path, memory_bytes=64 << 20, num_processes=64), "true"],
            env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True,
            timeout=TRIAL_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return path if done.returncode == 0 else None


def scope_argv(runner: str, *, memory_bytes: int, num_processes: int) -> list[str]:
    """The prefix that runs a command in a scope of its own; the scope ends with its processes."""
    return [
        runner, "--user", "--scope", "--quiet", "--collect",
        "-p", f"MemoryMax={memory_bytes + RUNTIME_BYTES}", "-p", "MemorySwapMax=0",
        "-p", f"TasksMax={num_processes}", "--",
    ]  # fmt: skip
