"""`prorl-hpc eval`: pass@k of a run's policy, a checkpoint or a model directory."""

import argparse
import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpc.errors import UserError
from hpc.scratch import OwnedDirectory
from prorl_hpc.choices import EngineKind
from prorl_hpc.cli.evaluate_target import find_target
from prorl_hpc.cli.inputs import check_output
from prorl_hpc.cli.runs import find_run
from prorl_hpc.cli.table import table
from prorl_hpc.recipe import Recipe

if TYPE_CHECKING:
    from prorl_hpc.evaluation.evaluate import Evaluation

EPILOG = """\
  prorl-hpc eval quickstart                                 the newest version, pass@1
  prorl-hpc eval quickstart --version 40 --samples 16 --k 1,8
  prorl-hpc eval quickstart --versions all --at-once 4      a job array: table, JSON, HTML
  prorl-hpc eval quickstart --versions 10,20,30
  prorl-hpc eval runs/quickstart/checkpoints/step-00000040  the policy of a checkpoint
  prorl-hpc eval quickstart suite=file tasks.math.data=test.jsonl --samples 16 --k 1,16
  prorl-hpc eval MODEL-DIRECTORY suite=puzzles rollout.engine.kind=vllm
  prorl-hpc eval MODEL-DIRECTORY recipe=logic --instances 100 --output results.json
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Sample the validation instances of a recipe's tasks, or a suite of others "
        "(prorl-hpc list suites), and estimate pass@k (unbiased) with a 95 % bootstrap interval "
        "over instances. One version runs in this process; several (--versions) as a job array, "
        "on a rollout node's resources.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target", help="run (name or directory), checkpoint of a run, or model directory"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="suite=NAME; for a model also recipe=NAME"
    )
    parser.add_argument("--recipe-dir", type=Path, metavar="DIR")
    parser.add_argument("--version", type=int, help="policy version of a run (the newest)")
    parser.add_argument("--versions", metavar="all|N,N", help="several, each in a job of its own")
    parser.add_argument("--at-once", type=int, help="jobs at once (8 on Slurm, 1 here)")
    parser.add_argument("--hours", type=float, default=24.0, help="wait so long for the jobs (24)")
    parser.add_argument("--samples", type=int, default=1, help="rollouts per instance (1)")
    parser.add_argument("--k", default="1", help="which pass@k, e.g. 1,4,16 (1)")
    parser.add_argument("--instances", type=int, help="instances per task (the recipe's)")
    parser.add_argument("--temperature", type=float, help="(the recipe's validation.temperature)")
    parser.add_argument("--top-p", type=float, help="(the recipe's validation.top_p)")
    parser.add_argument("--engine", choices=[kind.value for kind in EngineKind])
    parser.add_argument(
        "--output", type=Path, help="write the results as JSON (several: HTML beside)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    ks = parse_ks(args.k, samples=args.samples)
    check_output(args.output)
    if args.versions is not None:
        versions = choose_versions(args)
        if len(versions) > 1:
            from prorl_hpc.cli.evaluate_versions import evaluate_versions

            return evaluate_versions(args, versions=versions, ks=ks)
        args.version = versions[0]
    return _one(args, ks)


def _one(args: argparse.Namespace, ks: list[int]) -> int:
    from hpc.files import publish
    from prorl_hpc.evaluation.evaluate import evaluate, to_json

    with OwnedDirectory.make("eval") as scratch:
        target = find_target(args, scratch=scratch)
        result = asyncio.run(
            evaluate(
                adjust(target.recipe, args),
                model=target.model,
                target=target.title,
                num_samples=args.samples,
                ks=ks,
                scratch=scratch,
                report=_report if sys.stderr.isatty() else None,
            )
        )
    print(describe(result))
    if args.output is not None:
        publish(args.output, data=to_json(result).encode())
        print(f"\nresults: {args.output}")
    return 0


def choose_versions(args: argparse.Namespace) -> list[int]:
    """Versions of `--versions`, ascending; raises UserError for those that aren't published."""
    from prorl_hpc.policy import published_versions

    if args.version is not None:
        raise UserError("--version and --versions are both given; leave one out")
    run_ = find_run(args.target)
    there = published_versions(run_)
    known = ", ".join(map(str, there)) or "none yet"
    if args.versions == "all":
        if not there:
            raise UserError(f"run {run_.name!r} has published no version yet")
        return there
    try:
        wanted = sorted({int(part) for part in args.versions.split(",")})
    except ValueError as err:
        raise UserError(
            f"--versions {args.versions!r} isn't a list of versions; write all, or e.g. 10,20"
        ) from err
    for version in wanted:
        if version not in there:
            raise UserError(
                f"version {version} of run {run_.name!r} isn't published; there: {known}"
            )
    return wanted


def parse_ks(text: str, *, samples: int) -> list[int]:
    """`1,8` as [1, 8]; raises UserError for what `samples` rollouts can't estimate."""
    if samples < 1:
        raise UserError(f"--samples {samples} is below 1")
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError as err:
        raise UserError(f"--k {text!r} isn't a list of numbers; write e.g. --k 1,4") from err
    if ks[0] < 1 or ks[-1] > samples:
        raise UserError(f"--k {text}: pass@k needs 1 <= k <= --samples {samples}; raise --samples")
    return ks


def adjust(recipe: Recipe, args: argparse.Namespace) -> Recipe:
    """The recipe with the command line's sampling and sizes."""
    validation = recipe.validation
    if args.temperature is not None:
        validation = dataclasses.replace(validation, temperature=args.temperature)
    if args.top_p is not None:
        validation = dataclasses.replace(validation, top_p=args.top_p)
    tasks = recipe.tasks
    if args.instances is not None:
        if args.instances < 1:
            raise UserError(f"--instances {args.instances} is below 1")
        tasks = {
            name: dataclasses.replace(task, validation_size=args.instances)
            for name, task in tasks.items()
        }
    rollout = recipe.rollout
    if args.engine is not None:
        engine = dataclasses.replace(rollout.engine, kind=EngineKind(args.engine))
        rollout = dataclasses.replace(rollout, engine=engine)
    return dataclasses.replace(recipe, validation=validation, tasks=tasks, rollout=rollout)


def describe(result: "Evaluation") -> str:
    """The results as a table."""
    ks = sorted({k for score in result.tasks.values() for k in score.pass_at})
    rows = []
    for name, score in result.tasks.items():
        intervals = [score.pass_at[k] for k in ks]
        rows.append(
            (
                name,
                score.instances,
                score.samples,
                *(f"{one.mean:.3f} [{one.low:.3f}, {one.high:.3f}]" for one in intervals),
                f"{score.reward.mean:.3f}",
                f"{score.response_tokens:.0f}",
                score.failures,
            )
        )
    header = ("task", "instances", "samples", *(f"pass@{k}" for k in ks), "reward", "tokens",
              "lost")  # fmt: skip
    title = f"{result.target}, temperature {result.temperature:g}, top-p {result.top_p:g}"
    return f"{title}\n\n{table(header, rows)}"


def _report(done: int, total: int) -> None:
    print(f"\r{done}/{total} rollouts", end="\n" if done == total else "", file=sys.stderr)
