"""The `prorl-hpc` command: picks the command's module and turns errors into exit codes.

Imports nothing heavy: a command's module is loaded only when it is called, and learning libraries
never on a login node.
"""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from hpc.errors import EXIT_USER, UserError
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
    "images": ("images", "build, import, verify and list container images"),
    "sandbox": ("sandbox", "run a command in an environment as a rollout would"),
    "doctor": ("doctor", "what this site can do and what an admin must change"),
}
"""Command: its module in `prorl_hpc.cli`, and one line of help."""

EXIT_INTERRUPTED = 130
EXIT_INTERNAL = 1


class Command(Protocol):
    """What a command's module has."""

    def parser(self) -> argparse.ArgumentParser: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code: 0, 1 (failure), 2 (user's mistake), 130."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except SystemExit as err:  # argparse: help (0) or a wrong option (2)
        return err.code if isinstance(err.code, int) else EXIT_USER
    except UserError as err:
        print(f"prorl-hpc: {err}", file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        print("prorl-hpc: interrupted; jobs that were started go on", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone: nothing to say, and nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INTERNAL
    except Exception:
        print(
            "prorl-hpc: an error that should not happen; the lines below say where, and "
            "docs/troubleshooting.md what to send along with a report",
            file=sys.stderr,
        )
        raise


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
