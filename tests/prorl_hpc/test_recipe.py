"""The typed recipe: round trip through YAML and its cross-field checks."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl_hpc.choices import EngineKind
from prorl_hpc.recipe import (
    AlgorithmConfig,
    BufferConfig,
    EngineConfig,
    LearnerConfig,
    Recipe,
    RecipeError,
    RolloutConfig,
    TaskConfig,
    check,
    dump_recipe,
    load_recipe,
    site_of,
)


def recipe(**changes: object) -> Recipe:
    base = Recipe(name="r", steps=3, tasks={"sums": TaskConfig(kind="logic")})
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_written_recipe_reads_back_equal(tmp_path: Path) -> None:
    original = recipe(seed=7, site={"name": "desk", "backend": "local", "placements": {}})
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(original))
    assert load_recipe(path) == original
    assert site_of(original).name == "desk"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: recipe(steps=0), "steps=0 must be above 0"),
        (lambda: recipe(tasks={}), "tasks is empty"),
        (lambda: recipe(tasks={"a": TaskConfig(kind="logic", weight=-1)}), "weight=-1"),
        (lambda: recipe(tasks={"a": TaskConfig(kind="logic", weight=0)}), "are 0"),
        (lambda: recipe(algorithm=AlgorithmConfig(num_rollouts=1)), "groups of at least 2"),
        (
            lambda: recipe(algorithm=AlgorithmConfig(batch_groups=10, updates_per_step=4)),
            "batch_groups=10 isn't divisible by algorithm.updates_per_step=4",
        ),
        (lambda: recipe(buffer=BufferConfig(min_usable=20)), "min_usable=20 exceeds"),
        (lambda: recipe(learner=LearnerConfig(deterministic=True)), "max_staleness=0"),
        (
            lambda: recipe(learner=LearnerConfig(publish_every_steps=3)),
            "publish_every_steps=3 needs algorithm.max_staleness=2",
        ),
        (lambda: recipe(learner=LearnerConfig(export_every_steps=0)), "export_every_steps=0"),
        (
            lambda: recipe(learner=LearnerConfig(ranks_per_node=3, gpus_per_node=2)),
            "learner.ranks_per_node=3 exceeds learner.gpus_per_node=2",
        ),
        (
            lambda: recipe(
                rollout=RolloutConfig(
                    gpus_per_node=4,
                    engine=EngineConfig(
                        kind=EngineKind.vllm, servers_per_node=3, tensor_parallel=2
                    ),
                )
            ),
            "need 6 GPUs, more than rollout.gpus_per_node=4",
        ),
        (
            lambda: recipe(tasks={"a": TaskConfig(kind="logic", num_rollouts=1)}),
            "tasks.a.num_rollouts=1",
        ),
    ],
)
def test_values_that_cannot_work_are_named(change: Callable[[], Recipe], message: str) -> None:
    with pytest.raises(RecipeError, match=message.replace(".", r"\.")):
        check(change())


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"none\.yaml"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "recipe.yaml").write_text("steps: [")
    with pytest.raises(RecipeError, match="can't be read"):
        load_recipe(tmp_path / "recipe.yaml")


def test_wrong_type_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: r\nsteps: many\ntasks: {a: {kind: logic}}\n")
    with pytest.raises(RecipeError, match=r"\$\.steps"):
        load_recipe(tmp_path / "recipe.yaml")
