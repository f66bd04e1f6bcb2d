"""`prorl-hpc export`: a policy version as a model directory of its own."""

import argparse
import shutil
from pathlib import Path

from hpc.errors import UserError
from prorl_hpc.cli.runs import find_run


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Copy a published policy version, checked against its hashes, as a model "
        "directory in Hugging Face form."
    )
    parser.add_argument("run", help="name or directory of the run")
    parser.add_argument("output", type=Path, help="directory to make")
    parser.add_argument("--version", type=int, help="the newest, unless given")
    return parser


def run(args: argparse.Namespace) -> int:
    from prorl_hpc.policy import PolicyError, latest_version, published_versions, verify_policy

    run_ = find_run(args.run, beginning=True)
    there = published_versions(run_)
    version = latest_version(run_) if args.version is None else args.version
    if version is None or version not in there:
        known = ", ".join(map(str, there)) or "none yet"
        raise UserError(f"version {version} of run {run_.name!r} isn't published; there: {known}")
    if args.output.exists():
        raise UserError(f"{args.output} exists; name a directory that doesn't")
    try:
        manifest = verify_policy(run_.policy(version))
    except PolicyError as err:
        raise UserError(str(err)) from err
    temporary = args.output.with_name(f".{args.output.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        shutil.copytree(run_.policy(version), temporary)
        temporary.rename(args.output)
    except OSError as err:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{args.output} can't be written: {err.strerror}") from err
    print(f"{args.output}: version {version}, step {manifest.step}")
    return 0
