"""The `prorl-hpc` command: picks the command's module and turns errors into exit codes.

Imports nothing heavy: a command's module is loaded only when it is called, and learning libraries
never on a login node.
"""

import argparse
import contextlib
import difflib
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Protocol, TextIO

from hpc.errors import EXIT_USER, HpcError, UserError
from prorl_hpc import __version__

COMMANDS: dict[str, tuple[str, str]] = {
    "submit": ("submit", "compose a recipe, plan its jobs and start them"),
    "demo": ("demo", "run the quickstart on this machine and show what it learned"),
    "status": ("status", "jobs of a run, their attempts and what ails them"),
    "watch": ("watch", "live progress of a run"),
    "logs": ("logs", "output of a role, newest attempt first"),
    "cancel": ("cancel", "end a run in good order"),
    "resume": ("resume", "continue after cancel, crash or walltime"),
    "scale": ("scale", "change the number of rollout nodes of a running run"),
    "reset-reference": ("reset_reference", "ask the learner to reset its reference policy"),
    "list": ("choices", "runs, recipes, sites and other choices"),
    "report": ("report", "write report.html with the curves of a run"),
    "show": ("show", "read the trajectories of a group"),
    "eval": ("evaluate", "pass@k of a run, a checkpoint or a model"),
    "export": ("export", "copy a policy version as a Hugging Face directory"),
    "buffer": ("buffer", "export trajectories as JSON lines or Parquet"),
    "serve": ("serve", "rollouts of a recipe's tasks over HTTP, for any trainer"),
    "images": ("images", "build, import, verify and list container images"),
    "instances": ("instances", "build, check and list the bugs of recipe=swe"),
    "sandbox": ("sandbox", "run a command in an environment as a rollout would"),
    "doctor": ("doctor", "what this site can do and what an admin must change"),
}
"""Command: its module in `prorl_hpc.cli`, and one line of help."""

REMEDIES = {
    errno.EACCES: "give a path that you may use, or ask its owner",
    errno.EPERM: "give a path that you may use, or ask its owner",
    errno.EROFS: "this file system is read-only; give another path",
    errno.ENOSPC: "the disk is full; make room, or give another path",
    errno.EDQUOT: "your quota is used up; make room, or give another path",
    errno.ENOTDIR: "a file is where a directory should be; give another path",
    errno.EISDIR: "a directory is where a file should be; give another path",
    errno.ENOENT: "it doesn't exist, or was deleted meanwhile",
    errno.ENAMETOOLONG: "give a shorter name",
}
"""What to do, by error number."""

EXIT_INTERRUPTED = 130
EXIT_INTERNAL = 1


class Command(Protocol):
    """What a command's module has."""

    def parser(self) -> argparse.ArgumentParser: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code: 0, 1 (failure), 2 (user's mistake), 130."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    make_printable(sys.stdout, sys.stderr)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as err:  # argparse: help (0) or a wrong option (2)
        return err.code if isinstance(err.code, int) else EXIT_USER
    except KeyboardInterrupt:
        _say("interrupted; jobs that were started go on")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return EXIT_INTERNAL
    except HpcError as err:  # raised on purpose: its message says what to do
        _say(str(err))
        return EXIT_USER
    except OSError as err:
        _say(_os_error(err))
        return EXIT_USER
    except Exception:
        print(
            "prorl-hpc: an error that should not happen; the lines below say where, and "
            "docs/troubleshooting.md what to send along with a report",
            file=sys.stderr,
        )
        raise


def make_printable(*streams: TextIO) -> None:
    """File names that aren't UTF-8, and terminals that aren't: printed escaped, not refused."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say(text: str) -> None:
    """One line to standard error."""
    with contextlib.suppress(OSError):
        print(f"prorl-hpc: {' '.join(text.split())}", file=sys.stderr)


def _drop_output() -> None:
    """The reader (head, less) has gone: nothing to say, and nothing to flush at exit."""
    with contextlib.suppress(OSError, ValueError):  # no file behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _os_error(err: OSError) -> str:
    """`permission denied: /x; ...` for what the operating system refused."""
    what = err.strerror or str(err) or type(err).__name__
    where = f": {os.fsdecode(err.filename)!r}" if isinstance(err.filename, str | bytes) else ""
    return f"{what}{where}; {REMEDIES.get(err.errno or 0, 'check the path and try again')}"


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else EXIT_USER
    if arguments[0] in ("-V", "--version"):
        print(f"prorl-hpc {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "see prorl-hpc --help"
        raise UserError(f"command {name!r} is unknown; {hint}")
    command: Command = importlib.import_module(f"prorl_hpc.cli.{COMMANDS[name][0]}")  # type: ignore[assignment]
    parser = command.parser()
    parser.prog = f"prorl-hpc {name}"
    has_subcommands = any(isinstance(a, argparse._SubParsersAction) for a in parser._actions)
    parse = parser.parse_args if has_subcommands else parser.parse_intermixed_args
    args = parse(rest)
    args.argv = arguments
    return command.run(args)


def _help() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: prorl-hpc COMMAND [...]",
            "",
            "Prolonged reinforcement learning of language-model agents, in batch, on Slurm.",
            "",
            *lines,
            "",
            "First steps:",
            "  prorl-hpc demo                                     on this machine, without Slurm",
            "  prorl-hpc submit recipe=logic site=NAME --dry-run  plan and scripts only",
            "  prorl-hpc submit recipe=logic site=NAME            then: prorl-hpc watch logic",
            "",
            "Runs are addressed by name or directory. `prorl-hpc COMMAND --help` says more.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
