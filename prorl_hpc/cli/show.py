"""`prorl-hpc show`: the trajectories of a group, as text."""

import argparse

from prorl_hpc.cli.runs import find_run


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Read the trajectories of a group.")
    parser.add_argument("run", help="name or directory of the run")
    parser.add_argument("--group", type=int, required=True, metavar="N", help="counted from 0")
    parser.add_argument(
        "--validation", type=int, metavar="V", help="of the validation of policy version V"
    )
    parser.add_argument("--rollout", type=int, metavar="I", help="only this one")
    parser.add_argument("--ids", action="store_true", help="token ids instead of text")
    return parser


def run(args: argparse.Namespace) -> int:
    from prorl_hpc.observe.trajectories import describe_group, load_decoder, read_group

    run_ = find_run(args.run, beginning=True)
    group = read_group(run_, args.group, validation=args.validation)
    decode = (lambda ids: " ".join(map(str, ids))) if args.ids else load_decoder(run_)
    print(describe_group(group, decode=decode, only=args.rollout))
    return 0
