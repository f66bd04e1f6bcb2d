"""`prorl-hpc demo`: the quickstart on this machine, followed to its end, and what it learned."""

import argparse
import time

from hpc.errors import UserError
from prorl_hpc.cli.submit import compose_recipe, submit
from prorl_hpc.cli.table import table
from prorl_hpc.cli.watch import follow
from prorl_hpc.run import Run


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Submit recipe=quickstart on the local backend, follow it, show validation "
        "before and after. A few minutes on two cores; further overrides are those of submit."
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="run with seeds 0..N-1")
    parser.add_argument("--name", default=None, help="name of the run (demo, with the time)")
    return parser


def run(args: argparse.Namespace) -> int:
    if args.seeds < 1:
        raise UserError(f"--seeds {args.seeds}: give at least 1")
    base = time.strftime("demo-%Y%m%d-%H%M%S") if args.name is None else args.name
    rows, runs, worst = [], [], 0
    for seed in range(args.seeds):
        name = base if args.seeds <= 1 else f"{base}-seed{seed}"
        run_, code = _once(args, name, seed)
        worst = max(worst, code)
        runs.append(run_)
        rows += _outcome(run_, seed)
    print()
    print(table(("seed", "task", "before", "after", "best", "steps", "resets"), rows))
    for run_ in runs:
        print(f"\nrun directory: {run_.root}")
    print(next_steps(str(runs[-1].root)))
    return worst


def next_steps(where: str) -> str:
    """What to type next."""
    commands = [
        (f"prorl-hpc report {where}", "the curves as one HTML page"),
        (f"prorl-hpc show {where} --group 0", "what the policy wrote, with rewards"),
        (f"prorl-hpc status {where}", "jobs, attempts, counts"),
        ("prorl-hpc list recipes", "what else there is to train"),
    ]
    width = max(len(command) for command, _ in commands)
    lines = [f"  {command:<{width}}   {text}" for command, text in commands]
    return "\n".join(["\nnext:", *lines])


def _once(args: argparse.Namespace, name: str, seed: int) -> tuple[Run, int]:
    overrides = ["recipe=quickstart", "site=local", *args.overrides]
    if args.seeds > 1:
        overrides.append(f"seed={seed}")
    recipe = compose_recipe(overrides, recipe_dir=None, name=name)
    run_, started = submit(recipe, argv=args.argv, overrides=overrides, dry_run=False)
    print(f"\n{started}\n", flush=True)
    try:
        return run_, follow(run_)
    except KeyboardInterrupt:
        from hpc.submit import cancel

        cancel(run_.root)
        print(f"run {run_.name} ends; `prorl-hpc resume {run_.root}` continues it", flush=True)
        raise


def _outcome(run_: Run, seed: int) -> list[tuple[object, ...]]:
    """Validation before and after, blended and by task."""
    from prorl_hpc.observe.history import read_history

    history = read_history(run_)
    done = int(history.steps[-1]["step"]) if history.steps else 0
    resets = len(history.resets)
    if not history.validations:
        return [(seed, "all", None, None, None, done, resets)]
    shown = history.validations
    best = max(one.score for one in shown)
    rows: list[tuple[object, ...]] = [
        (seed, "all", _text(shown[0].score), _text(shown[-1].score), _text(best), done, resets)
    ]
    for task in sorted(shown[-1].by_task) if len(shown[-1].by_task) > 1 else []:
        scores = [one.by_task[task] for one in shown if task in one.by_task]
        values = (_text(scores[0]), _text(scores[-1]), _text(max(scores)))
        rows.append((seed, task, *values, done, resets))
    return rows


def _text(score: float) -> str:
    return f"{score:.3f}"
