"""What a user can have got wrong that only files tell: model paths, data sets. Starts nothing."""

import dataclasses
import difflib
import importlib.util
import json
import os
import re
from pathlib import Path

from hpc.errors import UserError
from prorl_hpc.choices import AgentKind, CurriculumKind
from prorl_hpc.cli.runs import run_root as runs_root
from prorl_hpc.recipe import ModelConfig, Recipe, RecipeError

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


DEFAULT_RUN_ROOT = "runs"
"""The schema's `run_root`: it follows $PRORL_RUN_ROOT, as the look-up of runs by name does."""


def check_name(name: str) -> str:
    """Returns the run's name; raises RecipeError when it can't be a directory and a job name."""
    if not RUN_NAME.fullmatch(name):
        raise RecipeError(
            f"name={name!r} can't name a run; use letters, digits, '.', '_' and '-', at most 100"
        )
    return name


def check_output(path: Path | None) -> None:
    """Raises UserError now for a file that can't be written when the numbers are there."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"--output {str(path)!r} is a directory; name a file")
    if not os.access(path.parent, os.W_OK | os.X_OK) or not path.parent.is_dir():
        raise UserError(f"--output {str(path)!r}: {str(path.parent)!r} can't be written to")


def localise(recipe: Recipe) -> Recipe:
    """The recipe with relative paths made absolute: jobs start in other directories."""
    tasks = {
        name: dataclasses.replace(
            task,
            data=_absolute(task.data),
            validation_data=_absolute(task.validation_data),
            harness=dataclasses.replace(task.harness, package=_absolute(task.harness.package)),
        )
        for name, task in recipe.tasks.items()
    }
    model = recipe.model
    if model.path is not None and Path(model.path).expanduser().exists():
        model = dataclasses.replace(model, path=_absolute(model.path))
    root = runs_root() if recipe.run_root == DEFAULT_RUN_ROOT else Path(recipe.run_root)
    run_root = str(root.expanduser().resolve())
    return dataclasses.replace(recipe, tasks=tasks, model=model, run_root=run_root)


def check_inputs(recipe: Recipe) -> list[str]:
    """Raises RecipeError for what no job could work with; returns what only a real submit needs."""
    _check_bandit(recipe)
    notes = _check_model(recipe.model)
    for name, task in recipe.tasks.items():
        check_kind(name, task.kind)
        for label in ("data", "validation_data"):
            path = getattr(task, label)
            if path is not None:
                _check_data(f"tasks.{name}.{label}", Path(path))
        package = task.harness.package
        if task.agent is AgentKind.harness and package is not None and not Path(package).is_dir():
            raise RecipeError(
                f"tasks.{name}.harness.package={package!r} isn't a directory; make it with pip "
                "install --target DIRECTORY (docs/harness.md)"
            )
    return notes


def _check_bandit(recipe: Recipe) -> None:
    """The buffer's job runs in the environment that submits it."""
    if recipe.buffer.curriculum is CurriculumKind.bandit and not _installed("vowpalwabbit"):
        raise RecipeError(
            "buffer.curriculum=bandit needs the package vowpalwabbit, which isn't installed; pip "
            "install 'prorl-hpc[bandit]', or choose buffer.curriculum=solve_rate"
        )


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # what a module that was taken away leaves behind
        return False


def check_kind(name: str, kind: str) -> None:
    """Raises RecipeError for a kind of task that isn't registered."""
    from prorl_hpc.tasks.registry import KINDS

    if kind not in KINDS:
        close = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(KINDS)}"
        raise RecipeError(f"tasks.{name}.kind={kind!r} is unknown; {hint}")


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().resolve())


def _check_model(model: ModelConfig) -> list[str]:
    if model.path is None:
        if not model.config or not model.vocabulary:
            raise RecipeError(
                "model.path is null, and model.config or model.vocabulary is empty; name a model "
                "directory, or choose model=tiny"
            )
        return []
    path = Path(model.path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise RecipeError(
                f"model.path={model.path!r} holds no config.json; give a transformers model"
            )
        return []
    if path.exists():
        raise RecipeError(f"model.path={model.path!r} is a file; give the model's directory")
    if not HUB_NAME.fullmatch(model.path):
        raise RecipeError(f"model.path={model.path!r} doesn't exist; give a model's directory")
    if _cached(model.path):
        return []
    note = (
        f"model.path={model.path!r} is neither a directory nor in the Hugging Face cache "
        f"({_cache()}); fetch it first on a machine with network: hf download {model.path}"
    )
    return [note]


def _cache() -> Path:
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def _cached(name: str) -> bool:
    snapshots = _cache() / f"models--{name.replace('/', '--')}" / "snapshots"
    return snapshots.is_dir() and any(snapshots.glob("*/config.json"))


def _check_data(key: str, path: Path) -> None:
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise RecipeError(f"{key}={str(path)!r} is a directory; give a .jsonl or .parquet file")
        if size == 0:
            raise RecipeError(f"{key}={str(path)!r} is empty; give at least one problem")
        if path.suffix == ".jsonl":
            _check_first_line(key, path)
    except OSError as err:
        reason = f"{err.strerror}; give {key}=FILE"
        raise RecipeError(f"{key}={str(path)!r} can't be read: {reason}") from err


def _check_first_line(key: str, path: Path) -> None:
    with path.open("rb") as stream:
        line = next((text for text in stream if text.strip()), None)
    if line is None:
        raise RecipeError(f"{key}={str(path)!r} holds only blank lines; give at least one problem")
    try:
        row = json.loads(line)
    except ValueError as err:
        raise RecipeError(f"{key}={str(path)!r}: its first line isn't JSON ({err})") from err
    if not isinstance(row, dict):
        raise RecipeError(f"{key}={str(path)!r}: its first line isn't a JSON object")
