"""The contract of an environment: the sandbox in which one instance is attempted.

Knows the words (commands, results, limits, ends) and nothing of containers, shells or processes.
Whatever an agent does to its own environment is data: a `CommandResult`, or `EnvironmentEnded`
when nothing is left to run in. `SandboxError` alone means that the infrastructure failed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, Self, runtime_checkable

from hpc.errors import HpcError, SandboxError
from hpc.isolation import Feature, Isolation


class Backend(StrEnum):
    """What holds the shell."""

    apptainer = "apptainer"
    """Apptainer, or SingularityCE where that is what the site has."""
    bubblewrap = "bubblewrap"
    process = "process"
    """No isolation at all: needs `Feature.container` among the accepted absences."""


class Stop(StrEnum):
    """Why a command was stopped from outside."""

    timeout = "timeout"
    memory = "memory"
    processes = "processes"
    disk = "disk"


class EndReason(StrEnum):
    """Why an environment takes no more commands."""

    closed = "closed"
    wall = "wall"
    idle = "idle"
    shell_killed = "shell_killed"
    """The agent killed its shell more often than `Limits.num_shell_restarts`."""


class SandboxStartError(SandboxError):
    """The environment couldn't be started (an infrastructure failure: retry elsewhere)."""


class TransferError(HpcError, OSError):
    """`put`, `get` or `diff` couldn't be done inside the sandbox: no such file, too large, ..."""


class EnvironmentEnded(HpcError, RuntimeError):
    """The environment is over, and not through a fault of the infrastructure."""

    def __init__(self, reason: EndReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """What one command did."""

    output: bytes
    """Standard output and error together, as they came; capped when `truncated`."""
    exit_code: int
    """128 + signal when killed by one; 124 when stopped at its timeout."""
    duration_seconds: float
    timed_out: bool = False
    truncated: bool = False
    """The middle of the output was dropped; a mark tells how many bytes."""
    stopped_for: Stop | None = None
    shell_restarted: bool = False
    """The shell ended with this command; a fresh one waits (variables and directory are lost)."""

    @property
    def text(self) -> str:
        """The output as text; bytes that aren't UTF-8 become replacement characters."""
        return self.output.decode("utf-8", errors="replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one environment may use."""

    memory_bytes: int = 4 << 30
    """Per process by rlimit (data), over all processes by the watchdog (resident)."""
    num_processes: int = 512
    disk_bytes: int = 8 << 30
    """Written to the scratch layer; also the largest single file."""
    output_bytes: int = 64 << 10
    """Kept per command: half from the head, half from the tail."""
    transfer_bytes: int = 64 << 20
    """Largest file that `get` and `diff` return."""
    start_seconds: float = 120.0
    wall_seconds: float = 3600.0 * 4
    """Life of the environment, from its start."""
    idle_seconds: float = 3600.0
    """Longest pause between two commands."""
    num_shell_restarts: int = 1
    """How often a shell that was killed is replaced; a shell that `exit`ed always is."""

    def __post_init__(self) -> None:
        for name in (
            "memory_bytes",
            "num_processes",
            "disk_bytes",
            "output_bytes",
            "transfer_bytes",
            "start_seconds",
            "wall_seconds",
            "idle_seconds",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"limits.{name}={getattr(self, name)} must be positive")
        if self.num_shell_restarts < 0:
            raise ValueError(f"limits.num_shell_restarts={self.num_shell_restarts} is negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSpec:
    """What is asked of an environment before it starts."""

    backend: Backend
    image: Path | None
    """SIF file or unpacked directory; None is the host's own /usr, read-only (not for apptainer:
    it needs an image)."""
    directory: str = "/tmp"  # noqa: S108 - inside the sandbox
    """Working directory of the first command; made when missing."""
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Exported in the shell; they travel through a pipe, never through argv."""
    prologue: str = ""
    """Run in every new shell, after `variables` and in `directory`: what the image's own login
    would do. Must succeed."""
    binds: tuple[tuple[Path, str], ...] = ()
    """(host path, path inside), all read-only."""
    writable: tuple[str, ...] = ()
    """Directories of the image that must be writable; only read by backends without an overlay
    (they copy them)."""
    limits: Limits = field(default_factory=Limits)
    accept_missing: frozenset[Feature] = frozenset()
    """The explicit override: isolation features that may be absent, and then are recorded."""


@runtime_checkable
class Environment(Protocol):
    """One sandbox with one persistent shell. One command at a time; used as `async with`."""

    @property
    def isolation(self) -> Isolation:
        """What separates it from the host; known after `start`."""
        ...

    async def start(self) -> None:
        """Raises SandboxStartError (infrastructure) or IsolationError (the site)."""
        ...

    async def run(self, command: str | bytes, timeout_seconds: float) -> CommandResult:
        """Runs `command` in the persistent shell.

        Raises EnvironmentEnded when nothing is left to run in, SandboxError when the sandbox was
        lost and couldn't be restarted.
        """
        ...

    async def put(self, path: str, data: bytes) -> None:
        """Writes a file inside (directories are made). Raises TransferError."""
        ...

    async def get(self, path: str) -> bytes:
        """Reads a regular file from inside. Raises TransferError."""
        ...

    async def diff(self, directory: str, base: str = "HEAD") -> bytes:
        """Stops all other processes, then `git diff` of the tree (new files too) against `base`."""
        ...

    async def close(self) -> None:
        """Ends every process and removes the scratch. Never raises for what the agent did."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...
