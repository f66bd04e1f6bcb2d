"""`prorl-hpc report`: the run as one HTML page."""

import argparse
from pathlib import Path

from hpc.errors import UserError
from prorl_hpc.cli.inputs import check_output
from prorl_hpc.cli.runs import find_run


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Write report.html: curves of validation, reward, KL, lengths, speed; resets."
    )
    parser.add_argument("run", help="name or directory of the run")
    parser.add_argument("--output", type=Path, help="where to write it (RUN/report.html)")
    return parser


def run(args: argparse.Namespace) -> int:
    from hpc.files import publish
    from prorl_hpc.observe.report import collect, render_report

    run_ = find_run(args.run, beginning=True)
    check_output(args.output)
    path = args.output or run_.report
    try:
        publish(path, data=render_report(collect(run_)).encode())
    except OSError as err:
        raise UserError(f"report {str(path)!r} can't be written: {err.strerror}") from err
    print(path)
    return 0
