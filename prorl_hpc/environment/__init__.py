"""The per-instance sandbox: a persistent shell in a rootless container. Knows no tasks."""

from prorl_hpc.environment.base import (
    Backend,
    CommandResult,
    EndReason,
    Environment,
    EnvironmentEnded,
    EnvironmentSpec,
    Limits,
    SandboxStartError,
    Stop,
    TransferError,
)
from prorl_hpc.environment.factory import EnvironmentFactory

__all__ = [
    "Backend",
    "CommandResult",
    "EndReason",
    "Environment",
    "EnvironmentEnded",
    "EnvironmentFactory",
    "EnvironmentSpec",
    "Limits",
    "SandboxStartError",
    "Stop",
    "TransferError",
]
