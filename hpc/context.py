"""Which job a script belongs to, on which node, until when. Reads variables, records nothing."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc import slurm
from hpc.errors import PlanError
from hpc.rundir import RunDirectory

LOCAL = "local-"
"""Job ids of the local backend begin so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The job that this process belongs to, read from the script's variables."""

    run: RunDirectory
    job: str
    role: str
    index: int
    job_id: str
    max_attempts_without_progress: int
    on_preempt: str
    scratch_base: str
    walltime_minutes: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Context":
        """Raises PlanError where a variable of the script is missing or isn't a number."""
        try:
            return cls(
                run=RunDirectory(Path(environment["PRORL_RUN_DIR"])),
                job=environment["PRORL_JOB"],
                role=environment["PRORL_ROLE"],
                index=int(environment["PRORL_INDEX"]),
                job_id=job_id(environment),
                max_attempts_without_progress=int(environment["PRORL_ATTEMPTS_WITHOUT_PROGRESS"]),
                on_preempt=environment["PRORL_ON_PREEMPT"],
                scratch_base=environment["PRORL_SCRATCH_BASE"],
                walltime_minutes=int(environment["PRORL_WALLTIME_MINUTES"]),
            )
        except (KeyError, ValueError) as err:
            raise PlanError(
                f"not inside a script of prorl-hpc: {err}; run its sbatch file"
            ) from err


def job_id(environment: Mapping[str, str]) -> str:
    """`123`, `123_4` for an array task, `local-PID` without Slurm."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    given = environment.get("PRORL_JOB_ID", "")
    local = given if given.startswith(LOCAL) else f"{LOCAL}{os.getppid()}"
    return environment.get("SLURM_JOB_ID") or local


def node(environment: Mapping[str, str]) -> str:
    """This node as Slurm calls it, else by its host name."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def deadline(context: Context, *, environment: Mapping[str, str], now: float) -> float | None:
    """When the walltime ends (Unix seconds): as Slurm says, else counted from now."""
    given = environment.get("SLURM_JOB_END_TIME", "")
    if given.isdigit():
        return float(given)
    slurm_id = environment.get("SLURM_JOB_ID")
    asked = slurm.end_time(slurm_id) if slurm_id else None
    return asked if asked is not None else now + 60.0 * context.walltime_minutes
