"""What must hold between a recipe's values. Pure; single numbers are checked in `limits`."""

from prorl_hpc.choices import AgentKind, EngineKind, EnvironmentKind, InferencePlacement
from prorl_hpc.recipe import EngineConfig, Recipe, RecipeError, TaskConfig


def check_relations(recipe: Recipe) -> None:
    """Raises RecipeError naming the first values that can't work together."""
    if not recipe.tasks:
        raise RecipeError("tasks is empty; name at least one, e.g. tasks.puzzles.kind=logic")
    for name, task in recipe.tasks.items():
        if task.weight < 0:
            raise RecipeError(f"tasks.{name}.weight={task.weight} is negative")
        _check_agent(name, task)
    if sum(task.weight for task in recipe.tasks.values()) <= 0:
        raise RecipeError("the weights of all tasks are 0; give one a positive weight")
    _check_groups(recipe)
    _check_algorithm(recipe)
    _check_gpus(recipe)
    check_engine(recipe.rollout.engine)
    _check_placement(recipe)


def _check_agent(name: str, task: TaskConfig) -> None:
    if task.agent is not AgentKind.harness:
        return
    if not task.harness.command:
        raise RecipeError(
            f"tasks.{name}.agent=harness needs tasks.{name}.harness.command, the program to run"
        )
    if task.environment is EnvironmentKind.none:
        raise RecipeError(f"tasks.{name}.agent=harness needs a sandbox: tasks.{name}.environment")


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


def _check_gpus(recipe: Recipe) -> None:
    """Every rank, and every shard of an inference server, needs a GPU of its own."""
    learner, rollout = recipe.learner, recipe.rollout
    if 0 < learner.gpus_per_node < learner.ranks_per_node:
        raise RecipeError(
            f"learner.ranks_per_node={learner.ranks_per_node} exceeds "
            f"learner.gpus_per_node={learner.gpus_per_node}; give each rank a GPU"
        )
    engine = rollout.engine
    wanted = engine.servers_per_node * engine.tensor_parallel
    if 0 < rollout.gpus_per_node < wanted and engine.kind in (EngineKind.vllm, EngineKind.sglang):
        raise RecipeError(
            f"rollout.engine.servers_per_node={engine.servers_per_node} of "
            f"tensor_parallel={engine.tensor_parallel} need {wanted} GPUs, more than "
            f"rollout.gpus_per_node={rollout.gpus_per_node}; lower them, or ask for more GPUs"
        )


def check_engine(engine: EngineConfig) -> None:
    """Raises RecipeError for an engine without what its kind needs."""
    if engine.kind is EngineKind.openai and not engine.urls:
        raise RecipeError(
            "rollout.engine.kind=openai needs servers that run already; name them, e.g. "
            "rollout.engine.urls=[http://host:8000/v1]"
        )
    for url in engine.urls:
        if not url.startswith(("http://", "https://")):
            raise RecipeError(
                f"rollout.engine.urls holds {url!r}; an address begins with http:// or https://"
            )


def check_trainable(recipe: Recipe) -> None:
    """Raises RecipeError for what can be evaluated and served, and not trained.

    Asked at submit only. An endpoint that somebody else runs has no common way to load a version
    that the learner publishes; rollouts would come from the same old weights for ever.
    """
    from prorl_hpc.learner.preflight import check_training

    check_training(recipe)
    if recipe.rollout.engine.kind is EngineKind.openai:
        raise RecipeError(
            "rollout.engine.kind=openai can't train: such an endpoint can't load the learner's new "
            "versions, nor need it give token ids with the log-probabilities they were drawn by; "
            "train with transformers, vllm or sglang (eval and serve work with openai)"
        )


def _check_placement(recipe: Recipe) -> None:
    """Inference jobs own the GPUs, and there must be servers to start in them."""
    if recipe.inference.placement is not InferencePlacement.own_jobs:
        return
    engine, gpus = recipe.rollout.engine, recipe.inference.gpus_per_node
    if engine.kind is EngineKind.openai:
        raise RecipeError(
            "rollout.engine.kind=openai names servers that run already; set "
            "inference.placement=rollout_nodes, which starts none"
        )
    if recipe.rollout.gpus_per_node:
        raise RecipeError(
            f"rollout.gpus_per_node={recipe.rollout.gpus_per_node} has no use with "
            "inference.placement=own_jobs; set it to 0 and give inference.gpus_per_node"
        )
    wanted = engine.servers_per_node * engine.tensor_parallel
    if engine.kind is not EngineKind.transformers and 0 < gpus < wanted:
        raise RecipeError(
            f"rollout.engine.servers_per_node={engine.servers_per_node} of tensor_parallel="
            f"{engine.tensor_parallel} need {wanted} GPUs, but inference.gpus_per_node={gpus}; "
            "lower the servers or raise the GPUs"
        )
