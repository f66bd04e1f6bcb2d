"""`prorl-hpc export`: the policy of a version or a step as a model directory of its own."""

import argparse
import shutil
from pathlib import Path

from hpc.errors import HpcError, UserError
from prorl_hpc.cli.runs import find_run
from prorl_hpc.run import Run


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Write a policy as a model directory in Hugging Face form: a published "
        "version, checked against its hashes, or the policy of any step that is still there, be it "
        "as an export, a version or a checkpoint."
    )
    parser.add_argument("run", help="name or directory of the run")
    parser.add_argument("output", type=Path, help="directory to make")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--version", type=int, help="a published version (the newest)")
    which.add_argument("--step", type=int, help="an optimizer step")
    return parser


def run(args: argparse.Namespace) -> int:
    run_ = find_run(args.run)
    source = _of_version(run_, args.version) if args.step is None else _of_step(run_, args.step)
    if args.output.exists():
        raise UserError(f"{args.output} exists; name a directory that doesn't")
    if source is None:
        version, step = _from_checkpoint(run_, args.step, args.output), args.step
    else:
        version, step = _copy(source, args.output)
    print(f"{args.output}: version {version}, step {step}")
    return 0


def _of_version(run_: Run, version: int | None) -> Path:
    from prorl_hpc.policy import latest_version, published_versions

    there = published_versions(run_)
    version = latest_version(run_) if version is None else version
    if version is None or version not in there:
        known = ", ".join(map(str, there)) or "none yet"
        raise UserError(f"version {version} of run {run_.name!r} isn't published; there: {known}")
    return run_.policy(version)


def _of_step(run_: Run, step: int) -> Path | None:
    """A directory that holds the policy of a step; None when only a checkpoint may."""
    from prorl_hpc.policy import PolicyError, published_versions, read_manifest

    exported = run_.export(step)
    places = [exported] if exported.is_dir() else []
    places += [run_.policy(version) for version in reversed(published_versions(run_))]
    for place in places:
        try:
            if read_manifest(place).step == step:
                return place
        except PolicyError:
            continue
    return None


def _from_checkpoint(run_: Run, step: int, output: Path) -> int:
    from prorl_hpc.learner.export import export_checkpoint

    try:
        return export_checkpoint(run_, step, output)
    except (HpcError, OSError) as err:
        raise UserError(str(err)) from err


def _copy(source: Path, output: Path) -> tuple[int, int]:
    """(version, step) of what was copied."""
    from prorl_hpc.policy import PolicyError, verify_policy

    try:
        manifest = verify_policy(source)
    except PolicyError as err:
        raise UserError(str(err)) from err
    temporary = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        shutil.copytree(source, temporary)
        temporary.rename(output)
    except OSError as err:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{output} can't be written: {err.strerror}") from err
    return manifest.version, manifest.step
