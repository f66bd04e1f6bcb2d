"""`prorl-hpc submit`: recipe to run directory to jobs."""

import argparse
import dataclasses
from pathlib import Path

from hpc.errors import UserError
from hpc.plan import Plan
from hpc.site import Backend, Site
from prorl_hpc.cli.freeze import Frozen, freeze, submit_lock, was_started
from prorl_hpc.cli.table import table
from prorl_hpc.recipe import Recipe, dump_recipe, site_of
from prorl_hpc.run import Run

EPILOG = """\
Overrides follow Hydra's grammar: a group chooses a file (recipe=, site=, algorithm=, model=,
task=[a,b]), anything else sets a value. `prorl-hpc list recipes` shows what there is to choose.

  prorl-hpc submit recipe=quickstart
  prorl-hpc submit recipe=logic site=mycluster rollout.nodes=16 algorithm.kl_coef=1e-4
  prorl-hpc submit recipe=mine --recipe-dir ~/recipes      reads ~/recipes/recipe/mine.yaml
  prorl-hpc submit recipe=math task=math_file tasks.math.data=problems.jsonl --dry-run

The same command twice starts nothing twice.
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compose a recipe, plan its jobs, freeze both in a run directory, start them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="recipe=NAME and more")
    parser.add_argument("--name", help="name of the run (the recipe's own, unless given)")
    parser.add_argument(
        "--recipe-dir",
        type=Path,
        metavar="DIR",
        help="your own groups (DIR/recipe/*.yaml, DIR/site/*.yaml, ...), searched first",
    )
    parser.add_argument("--cfg", action="store_true", help="print the composed recipe, do nothing")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan and write the scripts, start nothing"
    )
    parser.add_argument("--wait", action="store_true", help="return when the run has ended")
    parser.add_argument("--follow", action="store_true", help="like --wait, with live progress")
    return parser


def run(args: argparse.Namespace) -> int:
    recipe = compose_recipe(args.overrides, recipe_dir=args.recipe_dir, name=args.name)
    if args.cfg:
        print(dump_recipe(recipe), end="")
        return 0
    run_, started = submit(
        recipe, argv=args.argv, overrides=args.overrides, dry_run=args.dry_run, quiet=args.follow
    )
    if args.dry_run:
        return 0
    print(started)
    if args.follow or args.wait:
        from prorl_hpc.cli.watch import follow

        return follow(run_, quiet=not args.follow)
    print(f"run directory: {run_.root}\nnext: prorl-hpc watch {run_.name}")
    return 0


def compose_recipe(overrides: list[str], *, recipe_dir: Path | None, name: str | None) -> Recipe:
    """The composed recipe with its final name and absolute paths."""
    from prorl_hpc.cli.inputs import check_name, localise
    from prorl_hpc.compose import compose

    recipe = compose(overrides, recipe_dir=recipe_dir)
    chosen = check_name(recipe.name if name is None else name)
    return localise(dataclasses.replace(recipe, name=chosen))


def submit(
    recipe: Recipe, *, argv: list[str], overrides: list[str], dry_run: bool, quiet: bool = False
) -> tuple[Run, str]:
    """Freezes the run and starts its jobs; returns the run and a sentence on what was started.

    Everything that can be wrong with the input is found before anything is queued.
    """
    from hpc.prepare import check, check_cluster
    from prorl_hpc.cli.inputs import check_inputs
    from prorl_hpc.planner import adjustments, make_plan
    from prorl_hpc.provenance import provenance
    from prorl_hpc.relations import check_trainable
    from prorl_hpc.tasks.registry import make_tasks

    check_trainable(recipe)
    site = site_of(recipe)
    run_ = Run(Path(recipe.run_root) / recipe.name)
    plan = make_plan(recipe, site, run_directory=run_.root)
    notes = adjustments(recipe, site)
    check(plan, site)
    missing = check_inputs(recipe)
    if not dry_run:
        if missing:
            raise UserError(missing[0])
        make_tasks(recipe)  # unknown families, lines that aren't problems, missing packages
    frozen = Frozen(
        recipe=recipe,
        site=site,
        plan=plan,
        provenance=provenance(argv, overrides=overrides),
    )
    if not quiet:
        print(describe(plan, site))
        for note in [*notes, *missing]:
            print(f"note: {note}")
    with submit_lock(run_):
        if not dry_run and site.backend is Backend.slurm:
            check_cluster(plan, site)
        freeze(run_, frozen)
        if dry_run:
            print(f"\ndry run: nothing was started; scripts and plan are in {run_.root}")
            return run_, ""
        return run_, _launch(run_)


def describe(plan: Plan, site: Site) -> str:
    """The plan as a table, with its node-hours."""
    rows = []
    for job in plan.ordered():
        place = site.placement(job.role)
        asked = job.resources
        rows.append(
            (
                job.name,
                job.array_size or 1,
                asked.nodes,
                asked.cpus_per_node,
                asked.gpus_per_node,
                asked.memory_mib,
                asked.walltime_minutes,
                place.partition if site.backend is Backend.slurm else "this machine",
                ", ".join(job.after),
            )
        )
    header = ("job", "tasks", "nodes", "cpus", "gpus", "MiB", "minutes", "partition", "after")
    return (
        f"run {plan.run} on site {site.name}\n\n{table(header, rows)}\n\n"
        f"{plan.node_hours():.1f} node-hours per walltime"
    )


def _launch(run_: Run) -> str:
    from hpc.prepare import load
    from hpc.status import states
    from hpc.submit import launch
    from prorl_hpc.observe.culprit import ending

    before = was_started(run_)
    plan, site = load(run_)
    launch(run_.root, plan, site)
    if not before:
        return f"run {run_.name} is started"
    end = ending(run_, states(run_))
    if end is None:
        return f"run {run_.name} is already started"
    return f"run {run_.name} was started before and isn't running: {end.text}"
