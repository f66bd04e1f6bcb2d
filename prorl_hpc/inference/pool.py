"""Which engine serves a recipe. Knows the kinds by name; imports an engine when it is made."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from prorl_hpc.choices import EngineKind
from prorl_hpc.inference.engine import Engine
from prorl_hpc.recipe import Recipe, RecipeError

Factory = Callable[..., Engine]
"""(recipe, *, path, version) -> an engine that isn't started yet."""

FACTORIES: dict[EngineKind, str] = {
    EngineKind.transformers: "prorl_hpc.inference.pool:make_transformers",
    EngineKind.vllm: "prorl_hpc.inference.vllm_engine:make_vllm",
    EngineKind.sglang: "prorl_hpc.inference.sglang_engine:make_sglang",
    EngineKind.openai: "prorl_hpc.inference.openai_engine:make_openai",
}
"""`module:function` of each kind that this version can serve."""


def make_engine(recipe: Recipe, *, path: Path, version: int) -> Engine:
    """The recipe's engine for the policy directory `path`, not started.

    Raises RecipeError for a kind that this version doesn't serve.
    """
    kind = recipe.rollout.engine.kind
    if kind not in FACTORIES:
        known = ", ".join(sorted(FACTORIES))
        raise RecipeError(f"rollout.engine.kind={kind} isn't served here; choose one of {known}")
    module, _, function = FACTORIES[kind].partition(":")
    factory: Factory = getattr(import_module(module), function)
    return factory(recipe, path=path, version=version)


def make_transformers(recipe: Recipe, *, path: Path, version: int) -> Engine:
    """The engine in this process; one model, whatever `servers_per_node` says."""
    from prorl_hpc.inference.transformers_engine import TransformersEngine

    return TransformersEngine(
        path=path,
        version=version,
        max_batch=recipe.rollout.engine.max_batch,
        dtype=recipe.model.dtype,
        attention=recipe.model.attention,
        deterministic=recipe.learner.deterministic,
    )
