"""`python -m prorl_hpc.learner --run DIR`: the learner's job on one node."""

import argparse
import sys
from pathlib import Path

from hpc.errors import EXIT_USER, UserError
from prorl_hpc.run import Run


def main(argv: list[str] | None = None) -> int:
    """Runs the learner; returns its exit code (0 done, 2 bad input, 75 to be continued)."""
    parser = argparse.ArgumentParser(prog="prorl_hpc.learner", description=__doc__)
    parser.add_argument("--run", required=True, type=Path, help="the run directory")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        return _main(Run(options.run.resolve()), is_rank=options.rank)
    except UserError as err:
        print(f"prorl-hpc: {err}", file=sys.stderr)
        return EXIT_USER


def _main(run: Run, *, is_rank: bool) -> int:
    from hpc.allocation import Allocation, StopFlag
    from prorl_hpc.recipe import load_recipe

    allocation = Allocation.from_environment()
    recipe = load_recipe(run.recipe)
    flag = StopFlag.of(allocation).install()
    if not is_rank and recipe.learner.nodes * recipe.learner.ranks_per_node > 1:
        from prorl_hpc.learner.launch import launch

        return launch(run, recipe, allocation=allocation, flag=flag)
    if is_rank:
        from prorl_hpc.learner.launch import end_with_parent

        end_with_parent()
    from prorl_hpc.learner.session import run_rank

    return run_rank(run, allocation=allocation, flag=flag)


if __name__ == "__main__":
    sys.exit(main())
