"""What must hold between a recipe's values. Pure; single numbers are checked in `limits`."""

from prorl_hpc.recipe import Recipe, RecipeError


def check_relations(recipe: Recipe) -> None:
    """Raises RecipeError naming the first values that can't work together."""
    for key, value in _positive(recipe):
        if isinstance(value, bool) or value <= 0:
            raise RecipeError(f"{key}={value} must be above 0")
    if not recipe.tasks:
        raise RecipeError("tasks is empty; name at least one, e.g. tasks.puzzles.kind=logic")
    for name, task in recipe.tasks.items():
        if task.weight < 0:
            raise RecipeError(f"tasks.{name}.weight={task.weight} is negative")
    if sum(task.weight for task in recipe.tasks.values()) <= 0:
        raise RecipeError("the weights of all tasks are 0; give one a positive weight")
    _check_groups(recipe)
    _check_algorithm(recipe)


def _positive(recipe: Recipe) -> list[tuple[str, float]]:
    algorithm = recipe.algorithm
    values: list[tuple[str, float]] = [
        ("steps", recipe.steps),
        ("algorithm.batch_groups", algorithm.batch_groups),
        ("algorithm.num_rollouts", algorithm.num_rollouts),
        ("algorithm.updates_per_step", algorithm.updates_per_step),
        ("algorithm.learning_rate", algorithm.learning_rate),
        ("algorithm.temperature", algorithm.temperature),
        ("rollout.nodes", recipe.rollout.nodes),
        ("rollout.max_new_tokens", recipe.rollout.max_new_tokens),
        ("learner.nodes", recipe.learner.nodes),
        ("learner.ranks_per_node", recipe.learner.ranks_per_node),
        ("learner.checkpoint_every_steps", recipe.learner.checkpoint_every_steps),
        ("learner.publish_every_steps", recipe.learner.publish_every_steps),
        ("learner.keep_checkpoints", recipe.learner.keep_checkpoints),
        ("learner.tokens_per_micro_batch", recipe.learner.tokens_per_micro_batch),
        ("validation.every_steps", recipe.validation.every_steps),
        ("validation.num_rollouts", recipe.validation.num_rollouts),
        ("buffer.min_usable", recipe.buffer.min_usable),
        ("buffer.lease_seconds", recipe.buffer.lease_seconds),
        ("buffer.group_deadline_seconds", recipe.buffer.group_deadline_seconds),
        ("model.context_tokens", recipe.model.context_tokens),
    ]
    if recipe.learner.export_every_steps is not None:
        values.append(("learner.export_every_steps", recipe.learner.export_every_steps))
    for name, task in recipe.tasks.items():
        for label in ("train_size", "max_new_tokens", "temperature", "num_rollouts"):
            value = getattr(task, label)
            if value is not None:
                values.append((f"tasks.{name}.{label}", value))
        values.append((f"tasks.{name}.validation_size", task.validation_size))
        values.append((f"tasks.{name}.max_turns", task.max_turns))
    return values


def _check_groups(recipe: Recipe) -> None:
    algorithm = recipe.algorithm
    counts = {"algorithm.num_rollouts": algorithm.num_rollouts}
    counts |= {
        f"tasks.{n}.num_rollouts": t.num_rollouts for n, t in recipe.tasks.items() if t.num_rollouts
    }
    for key, count in counts.items():
        if count < 2:
            raise RecipeError(
                f"{key}={count}: estimator {algorithm.estimator} needs groups of at least 2"
            )
        if recipe.buffer.min_usable > count:
            raise RecipeError(
                f"buffer.min_usable={recipe.buffer.min_usable} exceeds {key}={count}; lower it"
            )


def _check_algorithm(recipe: Recipe) -> None:
    algorithm = recipe.algorithm
    if algorithm.batch_groups % algorithm.updates_per_step:
        raise RecipeError(
            f"algorithm.batch_groups={algorithm.batch_groups} isn't divisible by "
            f"algorithm.updates_per_step={algorithm.updates_per_step}"
        )
    if algorithm.max_staleness < 0:
        raise RecipeError(f"algorithm.max_staleness={algorithm.max_staleness} is negative")
    if recipe.learner.deterministic and algorithm.max_staleness != 0:
        raise RecipeError("learner.deterministic=true needs algorithm.max_staleness=0")
    if recipe.learner.deterministic and recipe.learner.publish_every_steps != 1:
        raise RecipeError("learner.deterministic=true needs learner.publish_every_steps=1")
    every = recipe.learner.publish_every_steps
    if every > algorithm.max_staleness + 1:
        raise RecipeError(
            f"learner.publish_every_steps={every} needs algorithm.max_staleness={every - 1} or "
            f"more (it is {algorithm.max_staleness}): rollouts would wait for a policy that never "
            "comes"
        )
    if recipe.buffer.colocate not in ("none", "learner"):
        raise RecipeError(f"buffer.colocate={recipe.buffer.colocate!r}; choose none or learner")
    if not 0 < algorithm.clip_low < 1:
        raise RecipeError(f"algorithm.clip_low={algorithm.clip_low} is outside (0, 1)")
    if recipe.validation.temperature < 0 or not 0 < recipe.validation.top_p <= 1:
        raise RecipeError("validation.temperature must be 0 or more and top_p in (0, 1]")
