"""`prorl-hpc scale`: more or fewer rollout nodes while the run goes on."""

import argparse

from prorl_hpc.cli.runs import check_startable, find_run


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Change the number of rollout nodes. New ones join, the highest leave in good "
        "order; what they were doing is leased to others."
    )
    parser.add_argument("run", help="name or directory of the run")
    parser.add_argument("--rollout", type=int, required=True, metavar="N", help="nodes wanted")
    return parser


def run(args: argparse.Namespace) -> int:
    from hpc.submit import scale

    run_ = find_run(args.run)
    check_startable(run_)
    scale(run_.root, "rollout", args.rollout)
    print(f"run {run_.name} goes on with {args.rollout} rollout nodes")
    return 0
