"""`prorl-hpc instances`: builds the instances of a recipe's bugs and checks that they are fair.

Building needs the network and runs here; checking needs the sandbox that scores, and fans out over
a job array where the site has one.
"""

import argparse
import functools
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from hpc.errors import HpcError, UserError
from hpc.scratch import OwnedDirectory
from prorl_hpc.cli.table import table

if TYPE_CHECKING:
    from prorl_hpc.recipe import Recipe, TaskConfig
    from prorl_hpc.tasks.swe.bug import Bug
    from prorl_hpc.tasks.swe.store import Verdict
    from prorl_hpc.tasks.swe.task import SweTask

EPILOG = """\
  prorl-hpc instances build recipe=swe              source releases, trees, hidden tests
  prorl-hpc instances validate recipe=swe           the untouched tree fails, the gold patch passes
  prorl-hpc instances validate recipe=swe tasks.swe.environment=bubblewrap --only humanize-4.12.1
  prorl-hpc instances list recipe=swe

What validate finds is kept in the store; a run leaves out what was found wanting.
"""

MEMORY_MIB = 4096
MINUTES = 60
WIDTH = 120


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Instances of software engineering: build, check, list.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("build", "download releases and make trees, hidden tests and gold patches"),
        ("validate", "run the tests on the untouched tree and with the gold patch"),
        ("list", "what is built, and what checking it found"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("overrides", nargs="+", metavar="KEY=VALUE", help="recipe=swe and more")
        action.add_argument("--recipe-dir", type=Path, metavar="DIR")
        action.add_argument("--only", nargs="+", default=[], metavar="ID", help="these alone")
        if name != "list":
            action.add_argument("--at-once", type=int, default=2, metavar="N", help="(2)")
        if name == "validate":
            action.add_argument(
                "--logs", type=Path, metavar="DIR", help="shared directory for the array's logs"
            )
    return parser


def run(args: argparse.Namespace) -> int:
    from prorl_hpc.cli.submit import compose_recipe

    if getattr(args, "at_once", 1) < 1:
        raise UserError(f"--at-once {args.at_once} is below 1")
    recipe = compose_recipe(args.overrides, recipe_dir=args.recipe_dir, name=None)
    tasks = {name: config for name, config in recipe.tasks.items() if config.kind == "swe"}
    if not tasks:
        raise UserError("this recipe has no task of kind swe; try recipe=swe")
    code = 0
    for name, config in tasks.items():
        task, bugs = _select(name, config, args.only)
        if args.action == "build":
            code |= _build(task, bugs, at_once=args.at_once)
        elif args.action == "validate":
            code |= _validate(recipe, name, task, bugs, args)
        else:
            print(_listing(task, bugs))
    return code


def _select(name: str, config: "TaskConfig", only: Sequence[str]) -> "tuple[SweTask, list[Bug]]":
    from prorl_hpc.tasks.swe.task import open_swe

    task = open_swe(name, config, usable_only=False)
    known = {bug.instance_id: bug for bug in task.bugs()}
    for instance_id in only:
        if instance_id not in known:
            raise UserError(
                f"--only {instance_id!r} is no instance of tasks.{name}; see prorl-hpc instances "
                "list"
            )
    chosen = list(only) or sorted(known)
    return task, [known[instance_id] for instance_id in chosen]


# --- build -------------------------------------------------------------------------------------


def _build(task: "SweTask", bugs: "list[Bug]", *, at_once: int) -> int:
    from prorl_hpc.tasks.pypi_bugs import build_pypi
    from prorl_hpc.tasks.swe.bug import Form

    def build(bug: "Bug") -> str:
        if bug.form is not Form.pypi:
            return "its repository is in its image"
        try:
            return f"{len(build_pypi(bug, task.settings.store).hidden)} hidden test files"
        except HpcError as err:
            return f"FAILED: {err}"

    failed = 0
    with ThreadPoolExecutor(at_once) as pool:
        for bug, said in zip(bugs, pool.map(build, bugs), strict=True):
            failed += said.startswith("FAILED")
            print(f"{bug.instance_id}: {said}", flush=True)
    print(f"{len(bugs) - failed} of {len(bugs)} instances are in {task.settings.store.root}")
    return int(failed > 0)


# --- validate ----------------------------------------------------------------------------------


def _validate(
    recipe: "Recipe", name: str, task: "SweTask", bugs: "list[Bug]", args: argparse.Namespace
) -> int:
    from hpc.site import Backend
    from prorl_hpc.recipe import site_of
    from prorl_hpc.tasks.swe.bug import Form
    from prorl_hpc.tasks.swe.task import not_built

    store = task.settings.store
    missing = [
        b.instance_id for b in bugs if b.form is Form.pypi and not store.built(b.instance_id)
    ]
    if missing:
        raise UserError(not_built(name, store, missing))
    # a missing image or isolation is found here, and not in every job of an array
    task.environment_spec(task.instance_of(bugs[0]))
    if site_of(recipe).backend is Backend.slurm:
        found = _over_an_array(recipe, name, bugs, args)
    else:
        found = _here(task, bugs, args.at_once)
    print(_verdicts(found))
    good = sum(not isinstance(one, str) and one.ok for one in found.values())
    excluded = sum(not isinstance(one, str) and not one.ok for one in found.values())
    print(
        f"\n{good} of {len(bugs)} instances are fair, {excluded} excluded, "
        f"{len(bugs) - good - excluded} couldn't be checked; kept in {store.root / 'validation'}"
    )
    return int(good < len(bugs))


def _here(task: "SweTask", bugs: "list[Bug]", at_once: int) -> "dict[str, Verdict | str]":
    from prorl_hpc.tasks.swe.validate import check_bugs

    def tell(bug: "Bug", result: "Verdict | str", seconds: float) -> None:
        if sys.stderr.isatty():
            print(f"{bug.instance_id}: {_word(result)} ({seconds:.1f} s)", file=sys.stderr)

    with OwnedDirectory.make("instances") as scratch:
        return check_bugs(task, bugs, scratch=scratch, at_once=at_once, tell=tell)


def _over_an_array(
    recipe: "Recipe", name: str, bugs: "list[Bug]", args: argparse.Namespace
) -> "dict[str, Verdict | str]":
    from hpc.fanout import Done, fan_out
    from hpc.plan import Resources
    from prorl_hpc.recipe import site_of

    site = site_of(recipe)
    logs = args.logs or Path(recipe.run_root) / "instances"
    ids = [bug.instance_id for bug in bugs]
    results = fan_out(
        functools.partial(check_one, name, recipe.tasks[name], site.scratch),
        ids,
        site=site,
        role="instances",
        resources=Resources(
            nodes=1,
            cpus_per_node=1,
            gpus_per_node=0,
            memory_mib=MEMORY_MIB,
            walltime_minutes=MINUTES,
        ),
        directory=logs,
        at_once=args.at_once,
        timeout_seconds=MINUTES * 60.0 * (len(ids) // args.at_once + 1),
    )
    return {
        instance_id: one.value if isinstance(one, Done) else one.error
        for instance_id, one in zip(ids, results, strict=True)
    }


def check_one(name: str, config: "TaskConfig", scratch: str, instance_id: str) -> "Verdict | str":
    """One element of the array. Runs on a node, which has its own sandbox and scratch disk."""
    from prorl_hpc.tasks.swe.validate import check_bugs

    task, bugs = _select(name, config, [instance_id])
    with OwnedDirectory.make("instances", directory=Path(scratch)) as directory:
        return check_bugs(task, bugs, scratch=directory, at_once=1)[instance_id]


# --- what is shown -----------------------------------------------------------------------------


def _verdicts(found: "dict[str, Verdict | str]") -> str:
    rows = []
    for instance_id, one in sorted(found.items()):
        if isinstance(one, str):
            rows.append((instance_id, "", "", _short(one)))
        else:
            times = (f"{one.untouched_seconds:.1f} s", f"{one.gold_seconds:.1f} s")
            rows.append((instance_id, *times, _short(_word(one))))
    return table(("instance", "untouched", "gold", "verdict"), rows)


def _short(text: str) -> str:
    """Whole in the store's file."""
    return textwrap.shorten(text, WIDTH, placeholder=" ...")


def _word(one: "Verdict | str") -> str:
    if isinstance(one, str):
        return one
    return "fair" if one.ok else f"excluded: {one.reason}"


def _listing(task: "SweTask", bugs: "list[Bug]") -> str:
    from prorl_hpc.tasks.swe.bug import Form

    store = task.settings.store
    rows = []
    for bug in bugs:
        state = "built" if store.built(bug.instance_id) else "not built"
        state = state if bug.form is Form.pypi else "in its image"
        verdict = store.verdict(bug.instance_id)
        said = _short(_word(verdict)) if verdict else "not checked"
        counts = (len(bug.fail_to_pass), len(bug.pass_to_pass))
        rows.append((bug.instance_id, *counts, state, said))
    return table(("instance", "must pass", "must stay", "state", "check"), rows)
