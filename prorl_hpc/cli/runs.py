"""Runs by name or path. Looks at directories, opens nothing but the frozen files."""

import os
from pathlib import Path

from hpc.errors import RunNotFound, UserError
from prorl_hpc.run import Run

ROOT_VARIABLE = "PRORL_RUN_ROOT"


def run_root() -> Path:
    """Where names are looked up: $PRORL_RUN_ROOT, else ./runs."""
    return Path(os.environ.get(ROOT_VARIABLE) or "runs").expanduser()


def find_run(name: str) -> Run:
    """The run of that name or path; raises RunNotFound naming the runs that there are."""
    candidates = [run_root() / name] if "/" not in name else []
    candidates.append(Path(name).expanduser())
    for candidate in candidates:
        run = Run(candidate.resolve())
        if run.recipe.is_file():
            return run
    known = [run.name for run in list_runs(run_root())]
    there = f"runs there: {', '.join(known)}" if known else "there are no runs there"
    raise RunNotFound(
        f"run {name!r} isn't in {run_root()} ({there}); give its directory or set {ROOT_VARIABLE}"
    )


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


def list_runs(root: Path) -> list[Run]:
    """All run directories below `root`, the newest last."""
    if not root.is_dir():
        return []
    runs = [Run(path.resolve()) for path in root.iterdir() if (path / "recipe.yaml").is_file()]
    return sorted(runs, key=lambda run: (run.recipe.stat().st_mtime, run.name))
