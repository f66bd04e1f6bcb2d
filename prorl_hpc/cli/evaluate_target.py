"""What `prorl-hpc eval` measures, and on which tasks. Reads runs and models; samples nothing.

RUN          a published version           on the run's validation instances, or a suite
CHECKPOINT   runs/RUN/checkpoints/step-*   the same
MODEL        a directory with config.json  on what recipe=... or suite=... names
"""

import argparse
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc.errors import HpcError, UserError
from prorl_hpc.cli.inputs import localise
from prorl_hpc.cli.runs import find_run
from prorl_hpc.recipe import Recipe, TaskConfig, check, load_recipe
from prorl_hpc.run import Run

CHECKPOINT = re.compile(r"step-(\d+)")

BESIDE_A_SUITE = ("suite", "task", "tasks", "validation")
"""What the command line may say of a run: the rest is its own recipe's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A model, what it is called, and the recipe it is sampled with."""

    recipe: Recipe
    model: Path
    title: str


def find_target(args: argparse.Namespace, *, scratch: Path) -> Target:
    """Raises UserError for what isn't there. A checkpoint's policy is written into `scratch`."""
    path = Path(args.target).expanduser()
    around = Run(path.resolve().parent.parent)
    step = CHECKPOINT.fullmatch(path.resolve().name)
    if step is not None and around.recipe.is_file():
        return _of_checkpoint(around, int(step.group(1)), args, scratch=scratch)
    if (path / "config.json").is_file():
        return Target(recipe=_of_model(path, around, args), model=path.resolve(), title=str(path))
    return _of_version(find_run(args.target), args)


def recipe_of_run(run_: Run, args: argparse.Namespace) -> Recipe:
    """The run's own recipe, with a suite's tasks and sampling where the command line names one."""
    recipe = load_recipe(run_.recipe)
    if not args.overrides:
        return recipe
    if not has_suite(args.overrides):
        raise UserError(
            "a run is evaluated with its own recipe; for other tasks add suite=NAME (prorl-hpc "
            "list suites), or leave the overrides out"
        )
    for text in args.overrides:
        key = re.split(r"[.=]", text.lstrip("+~"), maxsplit=1)[0]
        if key not in BESIDE_A_SUITE:
            raise UserError(
                f"override {text!r}: beside suite=... only task, tasks.* and validation.* change "
                "how a run is evaluated; leave it out"
            )
    suite = _suite(args)
    return dataclasses.replace(
        check(dataclasses.replace(recipe, tasks=suite.tasks, validation=suite.validation)),
        tasks=untrained(suite.tasks),
    )


def has_suite(overrides: list[str]) -> bool:
    return any(text.startswith("suite=") for text in overrides)


def untrained(tasks: Mapping[str, TaskConfig]) -> dict[str, TaskConfig]:
    """With weight 0, so that all data of each is there to be measured on."""
    return {name: dataclasses.replace(task, weight=0.0) for name, task in tasks.items()}


def _suite(args: argparse.Namespace) -> Recipe:
    from prorl_hpc.compose import compose_suite

    return localise(compose_suite(args.overrides, recipe_dir=args.recipe_dir))


def _of_model(path: Path, around: Run, args: argparse.Namespace) -> Recipe:
    if around.recipe.is_file() and (has_suite(args.overrides) or not args.overrides):
        return recipe_of_run(around, args)  # a version or an export that still lies in its run
    if not args.overrides:
        raise UserError(
            f"{path} is a model; name the tasks too, e.g. prorl-hpc eval {path} suite=puzzles, or "
            "recipe=NAME for a recipe's validation instances"
        )
    if has_suite(args.overrides):
        suite = _suite(args)
        return dataclasses.replace(suite, tasks=untrained(suite.tasks))
    from prorl_hpc.cli.submit import compose_recipe

    return compose_recipe(args.overrides, recipe_dir=args.recipe_dir, name=None)


def _of_checkpoint(run_: Run, step: int, args: argparse.Namespace, *, scratch: Path) -> Target:
    from prorl_hpc.learner.export import export_checkpoint

    recipe = recipe_of_run(run_, args)
    model = scratch / "model"
    try:
        export_checkpoint(run_, step, model)
    except (HpcError, OSError) as err:
        raise UserError(str(err)) from err
    return Target(recipe=recipe, model=model, title=f"{run_.name} step {step}")


def _of_version(run_: Run, args: argparse.Namespace) -> Target:
    from prorl_hpc.policy import latest_version, published_versions

    version = latest_version(run_) if args.version is None else args.version
    there = published_versions(run_)
    if version is None or version not in there:
        known = ", ".join(map(str, there)) or "none yet"
        raise UserError(f"version {version} of run {run_.name!r} isn't published; there: {known}")
    return Target(
        recipe=recipe_of_run(run_, args),
        model=run_.policy(version),
        title=f"{run_.name} version {version}",
    )
