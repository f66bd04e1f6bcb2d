"""What of a recipe would end a learner at its first step, found before anything is queued.

Pure; knows the recipe and no tensors: it runs on a login node. Sizes of memory are `memory`'s.
"""

from prorl_hpc.choices import Correction, KlPlace, StalePolicy
from prorl_hpc.learner.algorithm_error import AlgorithmError
from prorl_hpc.learner.objective_config import objective_config
from prorl_hpc.learner.stages import check_stages, stage_at
from prorl_hpc.recipe import AlgorithmConfig, Recipe


def longest_response(recipe: Recipe, *, task: str, context_tokens: int) -> int:
    """Most tokens the policy can sample in one rollout of the task: all its turns, or the context.

    `max_new_tokens` bounds one turn.
    """
    config = recipe.tasks[task]
    most = config.max_new_tokens or recipe.rollout.max_new_tokens
    return min(most * config.max_turns, context_tokens)


def longest_of_run(recipe: Recipe) -> int:
    """The longest response of any task in any stage: Dr.GRPO's constant, the same all the time."""
    return max(
        longest_response(recipe, task=name, context_tokens=context_tokens)
        for name in recipe.tasks
        for context_tokens in _contexts(recipe)
    )


def check_training(recipe: Recipe) -> None:
    """Raises AlgorithmError naming the first setting that the learner could not work with."""
    algorithm = recipe.algorithm
    check_stages(algorithm.stages)
    objective_config(algorithm, max_new_tokens=longest_of_run(recipe))
    _check_kl(algorithm)
    _check_stale(algorithm)
    _check_cosine(algorithm)
    for context_tokens in _contexts(recipe):
        for name in recipe.tasks:
            _check_overlong(recipe, task=name, context_tokens=context_tokens)


def _contexts(recipe: Recipe) -> list[int]:
    """The context length of each stage, the recipe's own first."""
    algorithm, own = recipe.algorithm, recipe.model.context_tokens
    steps = [0, *(stage.from_step for stage in algorithm.stages)]
    return [
        stage_at(
            step, algorithm.stages, context_tokens=own, num_rollouts=algorithm.num_rollouts
        ).context_tokens
        for step in steps
    ]


def _check_kl(algorithm: AlgorithmConfig) -> None:
    if algorithm.kl_importance_weighted and algorithm.kl_place is KlPlace.reward:
        raise AlgorithmError(
            "algorithm.kl_importance_weighted=true has no use with algorithm.kl_place=reward; "
            "set kl_place=loss, or leave it false"
        )


def _check_stale(algorithm: AlgorithmConfig) -> None:
    if algorithm.stale is StalePolicy.correct and algorithm.correction is Correction.none:
        raise AlgorithmError(
            "algorithm.stale=correct with algorithm.correction=none trains on stale groups as if "
            "they were fresh; choose a correction (truncated, icepop, sequence_mask, decoupled), "
            "or stale=drop"
        )


def _check_cosine(algorithm: AlgorithmConfig) -> None:
    shaping = algorithm.shaping
    if shaping.cosine_length_weight and (
        shaping.cosine_on_steps < 1 or shaping.cosine_off_steps < 0
    ):
        raise AlgorithmError(
            f"algorithm.shaping.cosine_on_steps={shaping.cosine_on_steps} and "
            f"cosine_off_steps={shaping.cosine_off_steps} make no schedule; on for 1 or more "
            "updates, off for 0 or more"
        )


def _check_overlong(recipe: Recipe, *, task: str, context_tokens: int) -> None:
    shaping = recipe.algorithm.shaping
    longest = longest_response(recipe, task=task, context_tokens=context_tokens)
    if shaping.overlong_penalty and not 0 < shaping.overlong_buffer_tokens <= longest:
        raise AlgorithmError(
            f"algorithm.shaping.overlong_buffer_tokens={shaping.overlong_buffer_tokens} must lie "
            f"in 1..{longest}, the longest response of task {task}; DAPO's fifth of it is "
            f"{max(longest // 5, 1)} (algorithm.shaping.overlong_penalty=0 switches it off)"
        )
