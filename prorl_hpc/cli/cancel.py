"""`prorl-hpc cancel`: end a run in good order."""

import argparse

from prorl_hpc.cli.runs import find_run


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="End the run's jobs: the learner writes a checkpoint first, nothing comes back "
        "by itself. `prorl-hpc resume` continues."
    )
    parser.add_argument("run", help="name or directory of the run")
    return parser


def run(args: argparse.Namespace) -> int:
    from hpc.queueing import half_made
    from hpc.status import states
    from hpc.submit import cancel
    from prorl_hpc.observe.culprit import ending

    run_ = find_run(args.run)
    end = ending(run_, states(run_))
    if end is not None and not half_made(run_):
        print(f"run {run_.name} isn't running, there is nothing to cancel: {end.text}")
        return 0
    cancel(run_.root)
    print(f"run {run_.name} ends; `prorl-hpc resume {run_.name}` continues it")
    return 0
