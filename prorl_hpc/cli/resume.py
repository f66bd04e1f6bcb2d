"""`prorl-hpc resume`: continue after cancel, crash or walltime."""

import argparse

from prorl_hpc.cli.runs import check_startable, find_run


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Start again what isn't running and isn't finished, from the newest checkpoint "
        "and with the frozen recipe. A run that is going on stays as it is."
    )
    parser.add_argument("run", help="name or directory of the run")
    parser.add_argument("--follow", action="store_true", help="live progress until it ends")
    return parser


def run(args: argparse.Namespace) -> int:
    from hpc.submit import resume

    run_ = find_run(args.run)
    check_startable(run_)
    resume(run_.root)
    print(f"run {run_.name} goes on; next: prorl-hpc watch {run_.name}")
    if args.follow:
        from prorl_hpc.cli.watch import follow

        return follow(run_, from_now=True)
    return 0
