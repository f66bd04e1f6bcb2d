"""`prorl-hpc list`: runs, and what recipes can choose from."""

import argparse
import textwrap
from pathlib import Path

from prorl_hpc.cli.runs import list_runs, run_root
from prorl_hpc.cli.table import table

WHAT = {
    "runs": "",
    "recipes": "recipe",
    "suites": "suite",
    "sites": "site",
    "algorithms": "algorithm",
    "models": "model",
    "tasks": "task",
    "keys": "",
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="List runs, or what a recipe can choose from.")
    parser.add_argument("what", nargs="?", default="runs", choices=list(WHAT))
    parser.add_argument("--recipe-dir", type=Path, metavar="DIR", help="your own groups")
    return parser


def run(args: argparse.Namespace) -> int:
    if args.what == "runs":
        print(_runs())
    elif args.what == "keys":
        from prorl_hpc.schema import known_keys

        print("\n".join(known_keys()))
    else:
        print(_options(WHAT[args.what], args.recipe_dir))
    return 0


def _runs() -> str:
    from prorl_hpc.observe.history import number
    from prorl_hpc.observe.metrics import last_row
    from prorl_hpc.recipe import RecipeError, load_recipe

    rows = []
    for run_ in list_runs(run_root()):
        try:
            steps = str(load_recipe(run_.recipe).steps)
        except RecipeError:
            steps = "?"
        row = last_row(run_.metrics("learner"), event="step") or {}
        rows.append((run_.name, f"{row.get('step', 0)}/{steps}", number(row, "reward"), run_.root))
    if not rows:
        return f"no runs in {run_root().resolve()}; start one: prorl-hpc submit recipe=quickstart"
    return table(("run", "step", "reward", "directory"), rows)


def _options(group: str, recipe_dir: Path | None) -> str:
    from prorl_hpc.compose import options

    found = options(group, recipe_dir=recipe_dir)
    return table((group, "what"), [(name, _summary(path)) for name, path in found.items()])


def _summary(path: Path) -> str:
    """The first sentence of the file's opening comment."""
    words: list[str] = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            words.append(line.lstrip("# ").rstrip())
    text = " ".join(words)
    end = text.find(". ")
    return textwrap.shorten(text if end < 0 else text[:end], 90, placeholder=" ...")
