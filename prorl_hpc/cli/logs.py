"""`prorl-hpc logs`: what a role printed."""

import argparse
import sys
import time
from collections import deque
from pathlib import Path

from hpc.errors import UserError
from hpc.ledger import format_indexes
from prorl_hpc.cli.runs import find_run
from prorl_hpc.run import Run

POLL_SECONDS = 0.5


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Print the newest attempt's output of a role.")
    parser.add_argument("run", help="name or directory of the run")
    roles = "buffer, rollout, inference or learner"
    parser.add_argument("role", nargs="?", default="learner", help=roles)
    parser.add_argument("index", nargs="?", type=int, default=0, help="array index (0)")
    parser.add_argument("--attempt", type=int, help="the newest, unless given")
    parser.add_argument("--lines", type=int, default=100, help="how many, 0 for all (100)")
    parser.add_argument("--follow", "-f", action="store_true", help="go on as more is written")
    parser.add_argument("--path", action="store_true", help="print the directory and stop")
    return parser


def run(args: argparse.Namespace) -> int:
    if args.lines < 0:
        raise UserError(f"--lines {args.lines} is negative; give 0 for all")
    run_ = find_run(args.run, beginning=True)
    directory = attempt_directory(run_, args.role, index=args.index, attempt=args.attempt)
    if args.path:
        print(directory)
        return 0
    files = sorted(directory.glob("*.log"))
    if not any(path.stat().st_size for path in files):
        print(
            f"prorl-hpc: nothing is in {directory} yet{_script_words(run_, args)}", file=sys.stderr
        )
    for path in files:
        if len(files) > 1:
            print(f"==> {path} <==")
        print_tail(path, lines=args.lines)
    if args.follow:
        follow(run_, args.role, index=args.index, start=directory)
    return 0


def _script_words(run_: Run, args: argparse.Namespace) -> str:
    """Where the job's script itself may have said something."""
    files = [path for path in (run_.logs / args.role).glob("*.out") if path.stat().st_size]
    newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
    return "" if newest is None else f"; its script's own words are in {newest}"


def attempt_directory(run_: Run, role: str, *, index: int, attempt: int | None) -> Path:
    """Logs of an attempt; raises UserError naming what there is."""
    base = run_.job_logs(role, index=index)
    attempts = sorted(
        int(p.name[8:]) for p in base.glob("attempt-*") if p.is_dir() and p.name[8:].isdigit()
    )
    if not attempts:
        raise UserError(_no_attempt(run_, role, index=index))
    if attempt is not None and attempt not in attempts:
        raise UserError(f"attempt {attempt} of {role} {index} isn't there; choose of {attempts}")
    return run_.attempt_logs(role, index=index, attempt=attempt or attempts[-1])


def _no_attempt(run_: Run, role: str, *, index: int) -> str:
    """Why there is nothing to show: a role that the run doesn't have, or one that waits."""
    found = run_.logs.iterdir() if run_.logs.is_dir() else ()
    roles = sorted(path.name for path in found if path.is_dir())
    if role not in roles:
        return f"run {run_.name!r} has no role {role!r}; it has {', '.join(roles) or 'no logs'}"
    indexes = sorted(
        int(path.name)
        for path in (run_.logs / role).iterdir()
        if path.name.isdigit() and any(path.glob("attempt-*"))
    )
    there = f"; begun have {format_indexes(indexes)}" if indexes else ""
    return (
        f"{role} {index} of run {run_.name!r} has no attempt yet{there}; "
        f"`prorl-hpc status {run_.name}` says what it waits for"
    )


def print_tail(path: Path, *, lines: int) -> None:
    with path.open(errors="replace") as stream:
        for line in deque(stream, maxlen=lines or None):
            print(line, end="")


def follow(run_: Run, role: str, *, index: int, start: Path) -> None:
    """Prints what is appended, and moves on to a newer attempt when there is one; until Ctrl-C."""
    offsets = {path: path.stat().st_size for path in start.glob("*.log")}
    directory = start
    while True:
        for path in sorted(directory.glob("*.log")):
            offsets[path] = _print_from(path, offsets.get(path, 0))
        newest = attempt_directory(run_, role, index=index, attempt=None)
        if newest != directory:
            print(f"==> {newest} <==", flush=True)
            directory = newest
        time.sleep(POLL_SECONDS)


def _print_from(path: Path, offset: int) -> int:
    with path.open("rb") as stream:
        stream.seek(offset)
        data = stream.read()
    if data:
        print(data.decode(errors="replace"), end="", flush=True)
    return offset + len(data)
