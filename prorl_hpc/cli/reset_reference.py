"""`prorl-hpc reset-reference`: a request that the learner obeys after its current step."""

import argparse
import json
import secrets
import time

from prorl_hpc.cli.runs import check_unfinished, find_run


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Ask the learner to make its policy the reference (and to clear the optimizer, "
        "as the recipe says). Obeyed once, also over a resume; recorded with its reason."
    )
    parser.add_argument("run", help="name or directory of the run")
    return parser


def run(args: argparse.Namespace) -> int:
    from hpc.files import publish

    run_ = find_run(args.run)
    check_unfinished(run_, to="reset its reference")
    run_.requests.mkdir(exist_ok=True)
    request = {"format": 1, "id": secrets.token_hex(8), "time": time.time()}
    publish(run_.requests / "reset-reference", data=json.dumps(request).encode() + b"\n")
    print(f"the learner of run {run_.name} resets its reference after its current step")
    return 0
