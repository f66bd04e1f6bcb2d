"""`prorl-hpc buffer export`: every trajectory of a run in one file."""

import argparse
from pathlib import Path

from hpc.errors import HpcError, UserError
from prorl_hpc.cli.runs import find_run


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The trajectories that a run has stored.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    export = actions.add_parser(
        "export", help="write closed groups as JSON lines, or as Parquet where pyarrow is installed"
    )
    export.add_argument("run", help="name or directory of the run")
    export.add_argument("output", type=Path, help="FILE.jsonl or FILE.parquet")
    export.add_argument("--kind", choices=("train", "validation"), help="only these groups")
    return parser


def run(args: argparse.Namespace) -> int:
    from prorl_hpc.buffer.export import export
    from prorl_hpc.records import Kind

    run_ = find_run(args.run, beginning=True)
    kind = None if args.kind is None else Kind(args.kind)
    try:
        count = export(run_, args.output, kind=kind)
    except OSError as err:
        raise UserError(f"{args.output} can't be written: {err.strerror or err}") from err
    except HpcError as err:
        raise err if isinstance(err, UserError) else UserError(str(err)) from err
    print(f"{args.output}: {count} trajectories")
    return 0
