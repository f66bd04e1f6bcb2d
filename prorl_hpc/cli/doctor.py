"""`prorl-hpc doctor`: what this site can do, what that means, and what to ask the admin for."""

import argparse
import socket
import textwrap
from pathlib import Path

from hpc.errors import UserError

MARKS = {"good": "ok  ", "note": "note", "problem": "FIX "}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Slurm, containers, file systems and GPUs as seen from here; the exact change "
        "to ask an admin for where something is missing. Starts no job, changes nothing."
    )
    parser.add_argument(
        "--path", action="append", type=Path, default=[], help="also look at this file system"
    )
    parser.add_argument("--problems", action="store_true", help="leave out what is fine")
    parser.add_argument("--write-site", type=Path, metavar="DIR", help="write DIR/site/HOST.yaml")
    return parser


def run(args: argparse.Namespace) -> int:
    from hpc.doctor import Severity, judge
    from hpc.doctor_facts import gather

    facts = gather(paths=args.path or [Path.cwd()])
    written = _write_site(facts, args.write_site) if args.write_site is not None else ""
    for finding in judge(facts):
        if args.problems and finding.severity is Severity.good:
            continue
        print(f"{MARKS[finding.severity.value]} {finding.name}: {finding.value}")
        for text in (finding.meaning, f"ask for: {finding.fix}" if finding.fix else ""):
            if text:
                print(
                    textwrap.fill(text, 96, initial_indent="       ", subsequent_indent="       ")
                )
    if written:
        print(f"\n{written}")
    return 0


def _write_site(facts: object, path: Path) -> str:
    from hpc.doctor_facts import Facts
    from hpc.doctor_site import site_profile

    assert isinstance(facts, Facts)
    if path.suffix != ".yaml":
        path = path / "site" / f"{socket.gethostname().split('.')[0]}.yaml"
    name = path.stem
    if path.exists():
        raise UserError(f"{path} exists; name a file that doesn't, e.g. {path.parent}/mine.yaml")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(site_profile(facts, name=name))
    except OSError as err:
        raise UserError(f"{path} can't be written: {err.strerror}") from err
    groups = path.parent.parent if path.parent.name == "site" else "DIR"
    where = "" if path.parent.name == "site" else f" move it to DIR/site/{path.name},"
    return (
        f"site profile: {path}; look it over,{where} then: prorl-hpc submit recipe=quickstart "
        f"site={name} --recipe-dir {groups} --dry-run"
    )
