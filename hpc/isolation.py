"""What separates a sandbox from its host: the features asked for and the record of those had.

Pure values. Knows no runtime and starts nothing.
"""

from dataclasses import asdict, dataclass
from enum import StrEnum

ISOLATION_FORMAT = 1


class Feature(StrEnum):
    """One thing that a sandbox should have; an override names it to run without."""

    container = "container"
    """A root file system of its own; without it the command sees the host's files."""
    user_namespace = "user_namespace"
    pid_namespace = "pid_namespace"
    network_none = "network_none"
    overlay = "overlay"
    """A writable layer on local disk over the read-only image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """The isolation that an environment really had; written into every trajectory."""

    backend: str
    """`apptainer`, `singularity`, `bubblewrap` or `process`."""
    runtime_version: str
    user_namespace: bool
    pid_namespace: bool
    network_none: bool
    own_root: bool
    """The host's home, /tmp and mounts aren't to be seen."""
    writable_layer: str
    """`overlay`, `copied-directories`, `tmpfs` or `host`."""
    memory_limit: str
    """What bounds memory, e.g. `cgroup-v2+rlimit+watchdog`, `systemd-scope+rlimit+watchdog`,
    `rlimit+watchdog` or `none`."""
    process_limit: str
    """What bounds the number of processes, in the same words; `watchdog` where rlimits would count
    all of the user's processes on the machine."""
    overridden: tuple[str, ...] = ()
    """Features that were missing and whose absence was accepted explicitly."""
    format: int = ISOLATION_FORMAT

    @property
    def is_full(self) -> bool:
        """True when nothing had to be overridden."""
        return not self.overridden

    def to_json(self) -> dict[str, object]:
        """Plain values, ready for a trajectory's side data."""
        return asdict(self) | {"overridden": list(self.overridden)}
