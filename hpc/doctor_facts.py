"""Facts of this machine and its cluster, gathered without judging them.

Everything absent is None or empty: no Slurm, no container runtime and no GPU are facts too. Every
command asked has an end. What the facts mean is `hpc.doctor`'s.
"""

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc.container import Features
from hpc.container_probe import probe

ASK_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """One partition as sinfo tells it."""

    name: str
    walltime: str
    num_cpus: int
    memory_mib: int
    gres: str
    is_default: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSystem:
    """Where a path lies and what works there."""

    path: str
    kind: str
    """`ext4`, `nfs4`, `lustre`, ..."""
    free_bytes: int
    flock: bool
    """Whether flock works there."""
    writable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What was found. Numbers are None when the machine doesn't tell."""

    slurm_version: tuple[int, int] | None
    slurm_config: dict[str, str]
    """`scontrol show config`, names as Slurm spells them."""
    partitions: tuple[Partition, ...]
    sacct_works: bool
    features: Features
    max_user_namespaces: int | None
    max_net_namespaces: int | None
    apparmor_restricts_userns: bool
    subuid: bool
    """Whether this user has a range in /etc/subuid."""
    fuse_writable: bool
    helpers: tuple[str, ...]
    """Of squashfuse, fuse-overlayfs, newuidmap: those on PATH."""
    session_mib: int | None
    """`sessiondir max size` of apptainer.conf."""
    cgroup: str
    """`v2`, `v1` or `none`."""
    file_systems: tuple[FileSystem, ...]
    gpus: tuple[str, ...]
    driver: str | None
    user: str
    is_root: bool


def gather(*, paths: Sequence[Path] = (), features: Features | None = None) -> Facts:
    """Asks this machine. `paths` are tested for locking, besides scratch and home."""
    version = re.search(r"(\d+)\.(\d+)", _ask(["sinfo", "--version"]))
    config = slurm_config(_ask(["scontrol", "show", "config"])) if version else {}
    listing = _ask(["sinfo", "--noheader", "--format=%P|%l|%c|%m|%G"]) if version else ""
    gpus = _ask(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    names = [line.split(", ") for line in gpus.splitlines() if ", " in line]
    user = _ask(["id", "-un"]).strip()
    scratch = Path(os.environ.get("TMPDIR", tempfile.gettempdir()))
    return Facts(
        slurm_version=(int(version[1]), int(version[2])) if version else None,
        slurm_config=config,
        partitions=partitions(listing),
        sacct_works=version is not None and _works(["sacct", "--noheader", "--user", user]),
        features=probe() if features is None else features,
        max_user_namespaces=_number("/proc/sys/user/max_user_namespaces"),
        max_net_namespaces=_number("/proc/sys/user/max_net_namespaces"),
        apparmor_restricts_userns=bool(
            _number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
        ),
        subuid=f"\n{user}:" in "\n" + _read("/etc/subuid"),
        fuse_writable=os.access("/dev/fuse", os.R_OK | os.W_OK),
        helpers=tuple(
            name for name in ("squashfuse", "fuse-overlayfs", "newuidmap") if shutil.which(name)
        ),
        session_mib=session_mib(
            _read("/etc/apptainer/apptainer.conf") or _read("/etc/singularity/singularity.conf")
        ),
        cgroup=_cgroup(),
        file_systems=tuple(
            file_system(path) for path in dict.fromkeys([scratch, Path.home(), *paths])
        ),
        gpus=tuple(name for name, _ in names),
        driver=names[0][1] if names else None,
        user=user,
        is_root=os.geteuid() == 0,
    )


def slurm_config(text: str) -> dict[str, str]:
    """Reads `scontrol show config`."""
    found = {}
    for line in text.splitlines():
        name, separator, value = line.partition("=")
        if separator and name.strip().isidentifier():
            found[name.strip()] = value.strip()
    return found


def partitions(listing: str) -> tuple[Partition, ...]:
    """Reads sinfo's `%P|%l|%c|%m|%G`; of a partition's several lines the largest nodes count."""
    found: dict[str, Partition] = {}
    for line in listing.splitlines():
        words = line.strip().split("|")
        if len(words) != 5:
            continue
        name = words[0].removesuffix("*")
        cpus, memory = (int(re.sub(r"\D", "", word) or 0) for word in words[2:4])
        known = found.get(name)
        if known is None or (cpus, memory) > (known.num_cpus, known.memory_mib):
            found[name] = Partition(
                name=name, walltime=words[1], num_cpus=cpus, memory_mib=memory,
                gres="" if words[4] == "(null)" else words[4], is_default=words[0].endswith("*"),
            )  # fmt: skip
    return tuple(found.values())


def session_mib(configuration: str) -> int | None:
    """Reads `sessiondir max size` (MiB)."""
    match = re.search(r"^\s*sessiondir max size\s*=\s*(\d+)", configuration, re.MULTILINE)
    return int(match[1]) if match else None


def file_system(path: Path) -> FileSystem:
    """Type, room and locking at `path` (or at its nearest parent that exists)."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    free = os.statvfs(path)
    writable, locks = False, False
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".prorl-lock-") as file:
            writable = True
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locks = True
    except OSError:
        pass
    return FileSystem(
        path=str(path), kind=mount_type(path, _read("/proc/mounts")), writable=writable,
        free_bytes=free.f_bavail * free.f_frsize, flock=locks,
    )  # fmt: skip


def mount_type(path: Path, mounts: str) -> str:
    """The type of the longest mount point above `path`; a later mount hides an earlier one."""
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = words[1].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), words[2]
    return kind


def _cgroup() -> str:
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return "v2"
    return "v1" if Path("/sys/fs/cgroup/memory").is_dir() else "none"


def _ask(argv: list[str]) -> str:
    """A command's output; empty when it is absent, fails or takes too long."""
    if shutil.which(argv[0]) is None:
        return ""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def _works(argv: list[str]) -> bool:
    try:
        return (
            subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_SECONDS,
                check=False,
            ).returncode == 0
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _number(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None
