"""Small plans and sites that the tests of the cluster layer share."""

from pathlib import Path
from typing import Any

from hpc.plan import Job, Plan, Resources
from hpc.rundir import RunDirectory
from hpc.site import Backend, Placement, Site

HOSTILE = 'it\'s "so" $HOME `id` %j #1'


def resources(**changes: Any) -> Resources:
    values = {
        "nodes": 1,
        "cpus_per_node": 1,
        "memory_mib": 100,
        "gpus_per_node": 0,
        "walltime_minutes": 30,
    }
    return Resources(**{**values, **changes})


def job(name: str = "learner", *command: str, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "role": name,
        "command": command or ("true",),
        "resources": resources(),
        "grace_seconds": 20,
    }
    return Job(name=name, **{**values, **changes})


def plan(*jobs: Job, directory: Path | str = "/scratch/runs/r1", run: str = "r1") -> Plan:
    return Plan(run=run, run_directory=str(directory), jobs=jobs)


def slurm_site(**changes: Any) -> Site:
    values: dict[str, Any] = {
        "name": "test",
        "backend": Backend.slurm,
        "placements": {"default": Placement(partition="cpu")},
        "accounting": False,
    }
    return Site(**{**values, **changes})


def local_site(**changes: Any) -> Site:
    values: dict[str, Any] = {
        "name": "local",
        "backend": Backend.local,
        "placements": {"default": Placement(partition="local")},
    }
    return Site(**{**values, **changes})


def run_of(path: Path) -> RunDirectory:
    return RunDirectory(path)
