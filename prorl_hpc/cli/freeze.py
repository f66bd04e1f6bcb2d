"""Writes a run directory whole before anything is started. Starts nothing itself.

A run that was started keeps its recipe; one that never was (a dry run) may be written anew.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from hpc.errors import UserError
from hpc.files import publish
from hpc.plan import Plan
from hpc.prepare import prepare
from hpc.site import Site
from prorl_hpc.choices import InferencePlacement
from prorl_hpc.recipe import Recipe, dump_recipe
from prorl_hpc.run import Run


class RunExists(UserError, FileExistsError):
    """Another recipe's run has this name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frozen:
    """What submit knows before it starts jobs."""

    recipe: Recipe
    site: Site
    plan: Plan
    provenance: str


def was_started(run: Run) -> bool:
    """Whether any job of the run was ever submitted or began."""
    return run.ledger.exists() and run.ledger.stat().st_size > 0


def freeze(run: Run, frozen: Frozen) -> bool:
    """Writes the run directory; False when it exists with this very recipe and was started.

    Raises RunExists when a started run of that name has another recipe.
    """
    text = dump_recipe(frozen.recipe)
    if was_started(run):
        if run.recipe.is_file() and run.recipe.read_text() == text:
            return False
        raise RunExists(
            f"run {run.name!r} was started with another recipe ({_difference(run, text)}); choose "
            f"--name, or continue it with `prorl-hpc resume {run.name}`"
        )
    _write(run, frozen, text)
    return True


@contextlib.contextmanager
def submit_lock(run: Run) -> Iterator[None]:
    """Two submits of one name at once follow each other (where the file system has locks)."""
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run.root / ".submit.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as err:
        raise UserError(f"run directory {str(run.root)!r} can't be made: {err.strerror}") from err
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(run: Run, frozen: Frozen, recipe_text: str) -> None:
    from prorl_hpc.buffer.keys import make_keys

    make_keys(run)
    if frozen.recipe.inference.placement is InferencePlacement.own_jobs:
        from prorl_hpc.inference.announce import make_token

        make_token(run)
    scripts = {path.name for path in prepare(run, plan=frozen.plan, site=frozen.site)}
    for path in run.scripts.glob("*.sbatch"):
        if path.name not in scripts:  # of an earlier dry run with other jobs
            path.unlink()
    publish(run.provenance, data=frozen.provenance.encode())
    # Last: a directory with a recipe is a run.
    publish(run.recipe, data=recipe_text.encode())


def _difference(run: Run, text: str) -> str:
    """The first value that differs, in words."""
    try:
        old = _flat(yaml.safe_load(run.recipe.read_text()))
    except (OSError, yaml.YAMLError):
        return "its recipe.yaml can't be read"
    new = _flat(yaml.safe_load(text))
    changed = [key for key in {**old, **new} if old.get(key, "-") != new.get(key, "-")]
    if not changed:
        return "same values, other order"
    key = changed[0]
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"{key}: {old.get(key, '-')} there, {new.get(key, '-')} here{more}"


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict) or not data:
        return {prefix.rstrip("."): data}
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.")
    return flat
