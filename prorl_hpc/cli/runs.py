"""Runs by name or path. Looks at directories, opens nothing but the frozen files."""

import os
from pathlib import Path

from hpc.errors import RunNotFound, UserError
from prorl_hpc.run import Run

ROOT_VARIABLE = "PRORL_RUN_ROOT"

KNOWN = 10
"""Names that a message lists."""


def run_root() -> Path:
    """Where names are looked up: $PRORL_RUN_ROOT, else ./runs."""
    return Path(os.environ.get(ROOT_VARIABLE) or "runs").expanduser()


def find_run(name: str, *, beginning: bool = False) -> Run:
    """The run of that name or path; raises RunNotFound naming the runs that there are.

    `beginning`: the first letters of one run's name will do. For commands that only look: what
    changes a run must not hit another one whose name happens to begin so.
    """
    candidates = [run_root() / name] if "/" not in name else []
    candidates.append(Path(name).expanduser())
    for candidate in candidates:
        run = Run(candidate.resolve())
        if run.recipe.is_file():
            return run
    runs = list_runs(run_root())
    begun = [run for run in runs if name and run.name.startswith(name)]
    if beginning and len(begun) == 1:
        return begun[0]
    if beginning and begun:
        raise RunNotFound(
            f"run {name!r} isn't in {run_root()}, and {len(begun)} begin so "
            f"({', '.join(run.name for run in begun[-KNOWN:])}); give more of the name"
        )
    known = [run.name for run in runs]
    there = f"runs there: {_some(known)}" if known else "there are no runs there"
    raise RunNotFound(
        f"run {name!r} isn't in {run_root()} ({there}); give its directory or set {ROOT_VARIABLE}"
    )


def _some(names: list[str]) -> str:
    """All of a few names, else the newest of them."""
    left_out = len(names) - KNOWN
    shown = ", ".join(names[-KNOWN:])
    return f"{shown} and {left_out} older" if left_out > 0 else shown


def check_startable(run: Run) -> None:
    """Raises UserError for a run whose jobs couldn't work: damaged or moved. Changes nothing."""
    from hpc.prepare import load
    from prorl_hpc.recipe import load_recipe

    load_recipe(run.recipe)
    plan, _ = load(run)
    planned = Path(plan.run_directory)
    if not (planned.exists() and planned.samefile(run.root)):
        raise UserError(
            f"run {run.name!r} was moved here from {plan.run_directory}, a path that its scripts "
            "hold; move it back, or submit anew"
        )


def check_unfinished(run: Run, *, to: str) -> None:
    """Raises UserError for a run whose work is done: nothing of it can be changed any more."""
    from hpc.status import states
    from prorl_hpc.observe.culprit import ending

    end = ending(run, states(run))
    if end is not None and end.done:
        raise UserError(f"run {run.name!r} can't {to}: it is {end.text}")


def list_runs(root: Path) -> list[Run]:
    """All run directories below `root`, the newest last."""
    if not root.is_dir():
        return []
    runs = [Run(path.resolve()) for path in root.iterdir() if (path / "recipe.yaml").is_file()]
    return sorted(runs, key=lambda run: (run.recipe.stat().st_mtime, run.name))
