"""Kinds of tasks by name. Knows where each lives; imports it when a recipe asks for it."""

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module

from prorl_hpc.recipe import Recipe, TaskConfig
from prorl_hpc.tasks.base import Task, TaskError

Factory = Callable[[str, TaskConfig, int], Task]
"""(key in the recipe, its configuration, seed) -> the task."""

KINDS: dict[str, str] = {
    "logic": "prorl_hpc.tasks.logic:make_logic",
    "math": "prorl_hpc.tasks.math:make_math",
    "stem": "prorl_hpc.tasks.stem:make_stem",
    "instructions": "prorl_hpc.tasks.instructions:make_instructions",
    "structured": "prorl_hpc.tasks.structured:make_structured",
    "swe": "prorl_hpc.tasks.swe.task:make_swe",
    "code": "prorl_hpc.tasks.code:make_code",
    "cli": "prorl_hpc.tasks.cli.task:make_cli",
    "tools": "prorl_hpc.tasks.tools.task:make_tools",
    "nemo_gym": "prorl_hpc.tasks.nemo_gym.task:make_nemo_gym",
}
"""`module:function` of each kind."""


def make_task(name: str, config: TaskConfig, seed: int) -> Task:
    """The task of key `name`. Raises TaskError for what can't be set up, naming the key."""
    if config.kind not in KINDS:
        close = get_close_matches(config.kind, KINDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(KINDS)}"
        raise TaskError(f"tasks.{name}.kind={config.kind!r} is unknown; {hint}")
    module, _, function = KINDS[config.kind].partition(":")
    factory: Factory = getattr(import_module(module), function)
    return factory(name, config, seed)


def make_tasks(recipe: Recipe) -> dict[str, Task]:
    """All tasks of a recipe, by key."""
    return {name: make_task(name, config, recipe.seed) for name, config in recipe.tasks.items()}
