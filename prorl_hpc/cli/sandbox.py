"""`prorl-hpc sandbox exec`: one environment, opened as a rollout would open it."""

import argparse
import asyncio
import sys
from pathlib import Path

from hpc.errors import HpcError, UserError
from hpc.scratch import OwnedDirectory

BACKENDS = ("apptainer", "bubblewrap", "process")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Run a command in an environment as a rollout would: same isolation, same "
        "limits. Prints the isolation that was had to standard error."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    execute = actions.add_parser(
        "exec", help="prorl-hpc sandbox exec IMAGE -- command (IMAGE may be `host`)"
    )
    execute.add_argument("--backend", choices=BACKENDS, help="apptainer; for `host`, bubblewrap")
    execute.add_argument("--directory", default="/tmp", help="working directory inside")  # noqa: S108
    execute.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    execute.add_argument("--accept-missing", action="append", default=[], metavar="FEATURE")
    execute.add_argument("image", help="SIF file or unpacked directory, or `host`")
    execute.add_argument("command", nargs=argparse.REMAINDER, metavar="-- command")
    return parser


def run(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UserError("no command is given; write prorl-hpc sandbox exec IMAGE -- command")
    image = None if args.image == "host" else Path(args.image).expanduser().absolute()
    if image is not None and not image.exists():
        raise UserError(f"image {args.image!r} doesn't exist; give a SIF file, or `host`")
    if not 0 < args.timeout < 1e9:
        raise UserError(f"--timeout {args.timeout:g} must be above 0 and finite")
    try:
        return asyncio.run(_execute(args, image, command))
    except HpcError as err:
        raise err if isinstance(err, UserError) else UserError(str(err)) from err


async def _execute(args: argparse.Namespace, image: Path | None, command: list[str]) -> int:
    import shlex

    from hpc.isolation import Feature
    from prorl_hpc.environment.base import Backend, EnvironmentSpec
    from prorl_hpc.environment.factory import EnvironmentFactory

    try:
        accepted = frozenset(Feature(name) for name in args.accept_missing)
    except ValueError as err:
        known = ", ".join(feature.value for feature in Feature)
        raise UserError(f"--accept-missing: {err}; features are {known}") from err
    spec = EnvironmentSpec(
        backend=Backend(args.backend or ("bubblewrap" if image is None else "apptainer")),
        image=image,
        directory=args.directory,
        accept_missing=accepted,
    )
    with OwnedDirectory.make("sandbox") as scratch:
        factory = EnvironmentFactory(scratch)
        try:
            print(f"isolation: {_words(factory.check(spec).to_json())}", file=sys.stderr)
            async with factory.create(spec) as environment:
                text = command[0] if len(command) == 1 else shlex.join(command)
                result = await environment.run(text, timeout_seconds=args.timeout)
        finally:
            factory.close()
    sys.stdout.buffer.write(result.output)
    sys.stdout.flush()
    if result.timed_out:
        print(f"stopped after {args.timeout:g} s", file=sys.stderr)
    return result.exit_code


def _words(isolation: dict[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in isolation.items() if value not in ("", []))
