"""What the dispatcher must know of a recipe. Plain values; knows no recipe file."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from prorl_hpc.buffer.mixture import TaskShare
from prorl_hpc.choices import CurriculumKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """From policy version `from_version` on, new groups are made like this."""

    from_version: int
    num_rollouts: int | None = None
    context_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferConfig:
    """What the dispatcher must know of a recipe."""

    tasks: Mapping[str, TaskShare]
    num_rollouts: int
    batch_groups: int
    max_staleness: int
    seed: int
    min_usable: int
    """A group closes at its deadline with at least so many usable trajectories."""
    group_deadline_seconds: float
    """Since the group's first lease."""
    lease_seconds: float
    """A lease ends so long after its node's last heartbeat."""
    max_infrastructure_retries: int
    deterministic: bool
    """Groups are handed out in the order of their ids and are pinned to a policy version."""
    stages: tuple[Stage, ...] = ()
    validation_sizes: Mapping[str, int] = field(default_factory=dict)
    """Validation instances by task; a task that isn't here has as many as are asked for."""
    curriculum: CurriculumKind = CurriculumKind.none
    """How the instance of a new group is chosen, where the mixture's own choice may be changed."""

    def stage(self, version: int) -> Stage | None:
        """The stage in force for groups that come up at `version`."""
        return max(
            (s for s in self.stages if s.from_version <= version),
            key=lambda s: s.from_version,
            default=None,
        )

    def rollouts_of(self, task: str, *, stage: Stage | None) -> int:
        """Rollouts per group: the task's own number, else the stage's, else the algorithm's."""
        staged = stage.num_rollouts if stage is not None else None
        return self.tasks[task].num_rollouts or staged or self.num_rollouts
