"""Which numbers a recipe may hold, by key. Pure; knows no relation between two values.

NaN and infinities pass comparisons that were meant to stop them, and a worker count of 0 makes a
run that waits for ever: all numbers are checked here, also those that nobody thought of.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from prorl_hpc.recipe import Recipe, RecipeError

LARGEST = 10**15
"""Above it no count, size or time can be meant; seeds may be larger."""

MAY_BE_NEGATIVE = ("algorithm.entropy_coef", "algorithm.shaping.", "model.config.", "site.")
MAY_BE_LARGE = ("seed", "model.config.")
POSITIVE = (
    "algorithm.batch_groups",
    "algorithm.gradient_clip",
    "algorithm.kl_input_clamp",
    "algorithm.kl_output_clamp",
    "algorithm.learning_rate",
    "algorithm.num_rollouts",
    "algorithm.reset.every_steps",
    "algorithm.reset.stall_validations",
    "algorithm.temperature",
    "algorithm.updates_per_step",
    "buffer.cpus",
    "buffer.group_deadline_seconds",
    "buffer.lease_seconds",
    "buffer.memory_mib",
    "buffer.min_usable",
    "buffer.peer_seconds",
    "buffer.seal_seconds",
    "buffer.shard_bytes",
    "buffer.walltime_minutes",
    "inference.cpus_per_node",
    "inference.memory_mib",
    "inference.nodes",
    "inference.walltime_minutes",
    "learner.batch_seconds",
    "learner.checkpoint_every_steps",
    "learner.cpus_per_node",
    "learner.export_every_steps",
    "learner.head_chunk_tokens",
    "learner.keep_checkpoints",
    "learner.keep_policies",
    "learner.memory_mib",
    "learner.nodes",
    "learner.publish_every_steps",
    "learner.ranks_per_node",
    "learner.tokens_per_micro_batch",
    "learner.walltime_minutes",
    "model.context_tokens",
    "model.lora.alpha",
    "rollout.cpus_per_node",
    "rollout.engine.max_batch",
    "rollout.engine.request_seconds",
    "rollout.engine.servers_per_node",
    "rollout.engine.start_seconds",
    "rollout.engine.tensor_parallel",
    "rollout.environment_seconds",
    "rollout.episode_seconds",
    "rollout.eval_workers",
    "rollout.init_workers",
    "rollout.max_new_tokens",
    "rollout.memory_mib",
    "rollout.nodes",
    "rollout.run_workers",
    "rollout.spool_bytes",
    "rollout.walltime_minutes",
    "steps",
    "tasks.*.max_new_tokens",
    "tasks.*.max_turns",
    "tasks.*.num_rollouts",
    "tasks.*.temperature",
    "tasks.*.train_size",
    "tasks.*.validation_size",
    "validation.every_steps",
    "validation.num_rollouts",
    "warmup.batch",
    "warmup.learning_rate",
    "warmup.max_tokens",
)
"""`*` stands for a name that the user chose."""


def check_numbers(recipe: Recipe) -> None:
    """Raises RecipeError naming the first number that can't be meant."""
    for key, value in _numbers(recipe, ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise RecipeError(f"{key}={value} isn't a finite number; give one")
        if abs(value) > LARGEST and not key.startswith(MAY_BE_LARGE):
            raise RecipeError(f"{key}={value!s:.20} is larger than {LARGEST:g}; lower it")
        positive = any(fnmatchcase(key, pattern) for pattern in POSITIVE)
        if positive and (isinstance(value, bool) or value <= 0):
            raise RecipeError(f"{key}={value} must be above 0")
        if value < 0 and not (key.startswith(MAY_BE_NEGATIVE) or ".options." in key):
            raise RecipeError(f"{key}={value} is negative; give 0 or more")


def _numbers(value: object, key: str) -> Iterator[tuple[str, int | float]]:
    """Every number (or truth value) at or below `value`, with its key."""
    if isinstance(value, int | float):
        yield key, value
        return
    prefix = f"{key}." if key else ""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _numbers(getattr(value, field.name), f"{prefix}{field.name}")
    elif isinstance(value, Mapping):
        for name, below in value.items():
            yield from _numbers(below, f"{prefix}{name}")
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for number, below in enumerate(value):
            yield from _numbers(below, f"{prefix}{number}")
