"""Facts about one cluster, as frozen input. Knows no plan's meaning and probes nothing."""

from dataclasses import dataclass, field
from enum import StrEnum

from hpc.errors import SiteError


class Backend(StrEnum):
    """Who starts the scripts."""

    slurm = "slurm"
    local = "local"


class GpuSpelling(StrEnum):
    """How a site wants GPUs asked for."""

    gres = "gres"
    """`--gres=gpu:h100:8`"""
    gpus_per_node = "gpus_per_node"
    """`--gpus-per-node=h100:8`"""


class OnPreempt(StrEnum):
    """What the partition's PreemptMode does to a preempted job."""

    requeue = "requeue"
    cancel = "cancel"
    """`--requeue` has no effect: the script resubmits itself instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where the jobs of a role go."""

    partition: str
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    gpu_type: str | None = None
    max_nodes: int | None = None
    """Nodes that one job, or all tasks of an array together, may take."""
    max_walltime_minutes: int | None = None
    cpus_per_node: int | None = None
    """Cores of a node here: a job asks for no more."""
    memory_mib: int | None = None
    gpu_memory_mib: int | None = None
    """Memory of one GPU here: a learner that needs more is refused before it is queued."""
    on_preempt: OnPreempt = OnPreempt.requeue
    directives: tuple[str, ...] = ()
    """Further `#SBATCH` options, e.g. `--exclusive`; values are quoted by the renderer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One cluster (or one machine): limits, spellings, partitions by role."""

    name: str
    backend: Backend
    placements: dict[str, Placement]
    """By role; `default` serves the roles that aren't named."""
    slurm_version: tuple[int, int] = (22, 5)
    gpu_spelling: GpuSpelling = GpuSpelling.gres
    accounting: bool = True
    """Whether sacct answers here."""
    max_array_size: int = 1001
    """Slurm's MaxArraySize: the largest index plus one."""
    max_node_hours: float | None = None
    """Refuse plans above this many node-hours per walltime."""
    scratch: str = "/tmp"  # noqa: S108 - a site's node-local disk, replaced by $TMPDIR where set
    binds: tuple[str, ...] = ()
    """Paths that containers of this site may see, read-only."""
    setup: tuple[str, ...] = ()
    """Shell lines before the command: `module load apptainer`, `source venv/bin/activate`."""
    cpus: int | None = None
    """Local backend: cores to share among the jobs."""
    extra: dict[str, str] = field(default_factory=dict)

    def placement(self, role: str) -> Placement:
        """Where `role` goes; raises SiteError when neither it nor `default` is placed."""
        found = self.placements.get(role) or self.placements.get("default")
        if found is None:
            raise SiteError(
                f"site {self.name!r} places neither role {role!r} nor `default`; add "
                f"site.placements.{role}.partition"
            )
        return found
