"""What jobs a run is made of: frozen, pure data. Knows no scheduler syntax and no learning."""

import re
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from hpc.errors import PlanError

NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
"""Names of jobs and roles: they end up in paths, directives and messages."""

FORMAT = 1
"""Format number of a persisted plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What one array task of a job (or the whole job, without an array) asks for."""

    nodes: int
    cpus_per_node: int
    memory_mib: int
    """Per node."""
    gpus_per_node: int
    walltime_minutes: int

    def __post_init__(self) -> None:
        for name in ("nodes", "cpus_per_node", "memory_mib", "walltime_minutes"):
            value = getattr(self, name)
            if value < 1:
                raise PlanError(f"{name}={value} is too small; give at least 1")
        if self.gpus_per_node < 0:
            raise PlanError(f"gpus_per_node={self.gpus_per_node} is negative; give 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job of a run, or one array of equal jobs."""

    name: str
    role: str
    """`buffer`, `rollout`, `learner`, ...; sites place jobs on partitions by role."""
    command: tuple[str, ...]
    """Argument vector, run once per node; reads PRORL_* from its environment."""
    resources: Resources
    array_size: int | None = None
    """Number of array tasks; None for a plain job."""
    array_limit: int | None = None
    """Most array tasks that run at once (Slurm's %limit)."""
    after: tuple[str, ...] = ()
    """Names of jobs that must have started first (start ordering, never success)."""
    restarts: bool = True
    """Whether the job comes back after walltime, preemption and node failure."""
    max_attempts_without_progress: int = 3
    """The chain stops after so many attempts in a row that made no progress."""
    grace_seconds: int = 120
    """Warning before the walltime: longer than a checkpoint takes, plus 60 s."""
    environment: tuple[tuple[str, str], ...] = ()
    """Extra variables for the command; values may hold anything but NUL."""

    def __post_init__(self) -> None:
        for what, value in (("job name", self.name), ("role", self.role)):
            if not NAME.fullmatch(value):
                raise PlanError(f"{what} {value!r} is not [a-z][a-z0-9_-]*; rename it")
        if not self.command:
            raise PlanError(f"job {self.name!r} has no command")
        if self.array_size is not None and self.array_size < 1:
            raise PlanError(f"array_size={self.array_size} of job {self.name!r} is below 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All jobs of one run, in an order in which they can be submitted."""

    run: str
    run_directory: str
    """Absolute path; may hold spaces and quotes, no newline."""
    jobs: tuple[Job, ...]
    format: int = field(default=FORMAT)

    def __post_init__(self) -> None:
        if "\n" in self.run_directory or "\0" in self.run_directory:
            raise PlanError(f"run directory {self.run_directory!r} holds a newline; choose another")
        names = [job.name for job in self.jobs]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise PlanError(f"job name {doubled[0]!r} is used twice; rename one")
        for job in self.jobs:
            for name in job.after:
                if name not in names:
                    raise PlanError(f"job {job.name!r} starts after {name!r}, which isn't planned")
        self.ordered()

    def job(self, name: str) -> Job:
        """The job of that name; raises PlanError when there is none."""
        for job in self.jobs:
            if job.name == name:
                return job
        known = ", ".join(job.name for job in self.jobs)
        raise PlanError(f"job {name!r} isn't in the plan; choose one of {known}")

    def ordered(self) -> tuple[Job, ...]:
        """The jobs in submission order; raises PlanError for a cycle."""
        graph = {job.name: set(job.after) for job in self.jobs}
        try:
            order = {name: i for i, name in enumerate(TopologicalSorter(graph).static_order())}
        except CycleError as err:
            raise PlanError(
                f"jobs wait for each other in a circle: {' -> '.join(err.args[1])}"
            ) from err
        return tuple(sorted(self.jobs, key=lambda job: order[job.name]))

    def node_hours(self) -> float:
        """Node-hours of one walltime of every job."""
        return sum(
            job.resources.nodes * (job.array_size or 1) * job.resources.walltime_minutes / 60
            for job in self.jobs
        )
