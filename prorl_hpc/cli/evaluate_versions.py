"""`prorl-hpc eval RUN --versions ...`: several versions as a job array, their table and files."""

import argparse
import time
from pathlib import Path

from hpc.errors import UserError
from prorl_hpc.cli.evaluate import adjust
from prorl_hpc.cli.evaluate_target import recipe_of_run
from prorl_hpc.cli.runs import find_run
from prorl_hpc.cli.table import table
from prorl_hpc.recipe import site_of


def evaluate_versions(args: argparse.Namespace, *, versions: list[int], ks: list[int]) -> int:
    """Returns 0 when every version was evaluated, else 1 with the reasons printed."""
    from hpc.files import publish
    from prorl_hpc.evaluation.sweep import VersionJob, results_json, sweep
    from prorl_hpc.observe.evaluation_page import header, render_versions, rows

    if args.at_once is not None and args.at_once < 1:
        raise UserError(f"--at-once {args.at_once} is below 1")
    if not 0 < args.hours < 1e6:
        raise UserError(f"--hours {args.hours:g} must be above 0 and finite")
    run_ = find_run(args.target)
    recipe = adjust(recipe_of_run(run_, args), args)
    jobs = [
        VersionJob(
            recipe=recipe,
            version=version,
            model=run_.policy(version),
            target=f"{run_.name} version {version}",
            num_samples=args.samples,
            ks=tuple(ks),
        )
        for version in versions
    ]
    directory = run_.evaluations / time.strftime("%Y%m%d-%H%M%S")
    text_path = args.output or directory / "results.json"
    page_path = Path(text_path).with_suffix(".html")
    print(f"{len(jobs)} versions as jobs; logs: {directory}", flush=True)
    results = sweep(
        jobs,
        site=site_of(recipe),
        directory=directory,
        at_once=args.at_once,
        timeout_seconds=args.hours * 3600.0,
    )
    publish(text_path, data=results_json(run_.name, results).encode())
    publish(page_path, data=render_versions(run_.name, results).encode())
    print(f"\n{table(header(ks), rows(results, ks))}\n\nresults: {text_path}\npage: {page_path}")
    failed = [one for one in results if one.evaluation is None]
    for one in failed:
        where = f" (log: {one.log})" if one.log is not None else ""
        print(f"version {one.version} wasn't evaluated: {one.error}{where}")
    return 1 if failed else 0
