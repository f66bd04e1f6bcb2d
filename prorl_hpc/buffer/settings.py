"""Recipe to what dispatcher and server need. The only module of the buffer that reads recipes."""

from collections.abc import Callable
from dataclasses import dataclass

from prorl_hpc.buffer.config import BufferConfig, Stage
from prorl_hpc.buffer.mixture import TaskShare
from prorl_hpc.buffer.server import ServerConfig
from prorl_hpc.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSize:
    """Instances that a task has: at most what the recipe asks for, fewer where its data ends."""

    train: int
    validation: int


def config_from_recipe(recipe: Recipe, *, size_of: Callable[[str], TaskSize]) -> BufferConfig:
    """Terms of the dispatcher; `size_of` is asked once for each task of the recipe."""
    algorithm, buffer = recipe.algorithm, recipe.buffer
    sizes = {name: size_of(name) for name in recipe.tasks}
    return BufferConfig(
        tasks={
            name: TaskShare(
                weight=task.weight,
                train_size=sizes[name].train,
                num_rollouts=task.num_rollouts,
            )
            for name, task in recipe.tasks.items()
            if task.weight > 0
        },
        num_rollouts=algorithm.num_rollouts,
        batch_groups=algorithm.batch_groups,
        max_staleness=algorithm.max_staleness,
        seed=recipe.seed,
        min_usable=buffer.min_usable,
        group_deadline_seconds=buffer.group_deadline_seconds,
        lease_seconds=buffer.lease_seconds,
        max_infrastructure_retries=buffer.max_infrastructure_retries,
        validation_sizes={name: size.validation for name, size in sizes.items()},
        curriculum=buffer.curriculum,
        deterministic=recipe.learner.deterministic,
        stages=tuple(
            Stage(
                from_version=stage.from_step,
                num_rollouts=stage.num_rollouts,
                context_tokens=stage.context_tokens,
            )
            for stage in algorithm.stages
        ),
    )


def server_from_recipe(recipe: Recipe) -> ServerConfig:
    """Limits of the server."""
    buffer = recipe.buffer
    return ServerConfig(
        shard_bytes=buffer.shard_bytes,
        seal_seconds=buffer.seal_seconds,
        max_pending_bytes=buffer.memory_mib * (1 << 20) // 8,
        peer_seconds=buffer.peer_seconds,
        stall_seconds=buffer.peer_seconds + 2 * buffer.group_deadline_seconds,
    )
