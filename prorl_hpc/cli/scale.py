"""`prorl-hpc scale`: more or fewer nodes of an array while the run goes on."""

import argparse

from hpc.errors import UserError
from prorl_hpc.cli.runs import check_startable, check_unfinished, find_run


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Change the number of rollout or inference nodes. New ones join, the highest "
        "leave in good order; what they were doing is done by others."
    )
    parser.add_argument("run", help="name or directory of the run")
    parser.add_argument("--rollout", type=int, metavar="N", help="rollout nodes wanted")
    parser.add_argument(
        "--inference",
        type=int,
        metavar="N",
        help="inference nodes wanted, where inference.placement=own_jobs",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    from hpc.submit import scale

    wanted = {"rollout": args.rollout, "inference": args.inference}
    counts = {job: count for job, count in wanted.items() if count is not None}
    if not counts:
        raise UserError("scale needs a number of nodes; give --rollout N or --inference N")
    run_ = find_run(args.run)
    check_startable(run_)
    check_unfinished(run_, to="be scaled")
    for job, count in counts.items():
        scale(run_.root, job, count)
    told = " and ".join(f"{count} {job} nodes" for job, count in counts.items())
    print(f"run {run_.name} goes on with {told}")
    return 0
