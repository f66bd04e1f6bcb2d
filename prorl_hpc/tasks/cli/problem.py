"""One problem of the command line: what the agent is told and finds, and what is checked after it.

As a line of a data set (everything but `instruction` and one of `checks` and `verify` is optional):

    {"instruction": "Write the number of lines of a.txt to n.txt.",
     "files": {"a.txt": "x\\ny\\n", "run.sh": {"text": "...", "mode": "755"},
               "b.bin": {"base64": "..."}, "old": {"link": "a.txt"}, "empty": {"directory": true}},
     "setup": "shell script, run before the agent comes", "workdir": "/tmp/work", "keep": ["/srv"],
     "checks": [{"check": "number", "path": "n.txt", "number": 2}],
     "verify": "shell script" or {"name": "shell script", ...}, "verify_files": {...},
     "timeout_seconds": 60, "solution": "shell script", "image": "name", "id": "lines-1"}

Pure; knows no sandbox and no generator.
"""

import base64
import binascii
import posixpath
from collections.abc import Mapping
from typing import Any

import msgspec

from prorl_hpc.tasks.cli.checks import Check, judge
from prorl_hpc.tasks.cli.state import Entry, EntryKind, State

WORK = "/tmp/work"  # noqa: S108 - inside the sandbox
UNKEPT = ("/", "/tmp", "/proc", "/sys", "/dev", "/.prorl")  # noqa: S108 - inside the sandbox
"""What no problem can ask to be kept or worked in; `/tmp/NAME` it can."""


class FileSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a problem: exactly one of text, base64, link and directory."""

    text: str | None = None
    base64: str | None = None
    link: str | None = None
    directory: bool = False
    mode: str | None = None
    """In octal; None: 644, and 755 for directories."""

    def entry(self) -> Entry:
        """Raises ValueError."""
        given = [self.text is not None, self.base64 is not None, self.link is not None]
        if sum([*given, self.directory]) != 1:
            raise ValueError("a file needs exactly one of text, base64, link and directory")
        mode = int(self.mode or ("755" if self.directory else "644"), 8)
        if not 0 <= mode <= 0o7777:
            raise ValueError(f"mode={self.mode!r} isn't one like 644")
        if self.directory:
            return Entry(kind=EntryKind.directory, mode=mode)
        if self.link is not None:
            return Entry(kind=EntryKind.link, mode=0o777, target=self.link)
        if self.text is not None:
            return Entry(kind=EntryKind.file, data=self.text.encode(), mode=mode)
        try:
            data = base64.b64decode(self.base64 or "", validate=True)
        except binascii.Error as err:
            raise ValueError(f"base64: {err}") from err
        return Entry(kind=EntryKind.file, data=data, mode=mode)


Files = dict[str, FileSpec | str]
"""Path (absolute, or relative to the working directory) -> what is there; a text is its content."""


class CliProblem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One problem, whole. Of this the agent sees `instruction`, `files` and what `setup` does."""

    instruction: str
    files: Files = {}
    setup: str = ""
    workdir: str = WORK
    keep: list[str] = []
    """Directories whose files are looked at afterwards, beside the working directory."""
    checks: list[Check] = []
    verify: dict[str, str] = {}
    """Scripts by name; each must exit with 0."""
    verify_files: Files = {}
    """Beside the scripts, in $VERIFY."""
    timeout_seconds: float = 60.0
    """Of `setup`, and of each script of `verify`."""
    solution: str = ""
    image: str = ""
    id: str = ""

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([self.workdir, *self.keep]))

    def state(self) -> dict[str, Entry]:
        """The files as the agent finds them, without what `setup` does. Raises ValueError."""
        return lay_out(self.files, self.workdir)


def lay_out(files: Mapping[str, FileSpec | str], directory: str) -> dict[str, Entry]:
    """The state that `files` describe: with the directories above them. Raises ValueError."""
    state = {directory: Entry(kind=EntryKind.directory, mode=0o755)}
    for name, given in files.items():
        path = posixpath.normpath(posixpath.join(directory, name))
        if not name or "\0" in name or not path.startswith(f"{directory}/"):
            raise ValueError(f"file {name!r} isn't below {directory}")
        spec = FileSpec(text=given) if isinstance(given, str) else given
        try:
            state[path] = spec.entry()
        except ValueError as err:
            raise ValueError(f"file {name!r}: {err}") from err
    for path in list(state):
        above = posixpath.dirname(path)
        while above.startswith(f"{directory}/"):
            found = state.setdefault(above, Entry(kind=EntryKind.directory, mode=0o755))
            if found.kind is not EntryKind.directory:
                raise ValueError(f"file {above!r} stands where a directory is needed")
            above = posixpath.dirname(above)
    return state


def decode_row(row: dict[str, Any]) -> CliProblem:
    """A decoded line. Raises ValueError or KeyError for a bad one."""
    if "instruction" not in row:
        raise KeyError("instruction")
    verify = row.get("verify")
    named = {"verify": {"verify": verify}} if isinstance(verify, str) else {}
    try:
        problem = msgspec.convert(row | named, CliProblem)
    except msgspec.ValidationError as err:
        raise ValueError(str(err)) from err
    _check_directories(problem)
    lay_out(problem.verify_files, WORK)
    if not problem.instruction.strip():
        raise ValueError("instruction is empty")
    if not problem.timeout_seconds > 0:
        raise ValueError(f"timeout_seconds={problem.timeout_seconds:g} must be positive")
    _check_goals(problem, problem.state())
    return problem


def _check_directories(problem: CliProblem) -> None:
    for path in problem.kept:
        bad = path in UNKEPT or path.startswith(("/proc/", "/sys/", "/dev/", "/.prorl/"))
        if not path.startswith("/") or posixpath.normpath(path) != path or bad:
            raise ValueError(
                f"workdir or keep {path!r} can't be looked at; give absolute paths like {WORK}"
            )


def _check_goals(problem: CliProblem, state: State) -> None:
    """Refuses what would reward an agent that does nothing, as far as that can be seen here."""
    verdict = judge(problem.checks, state, directory=problem.workdir)
    if not verdict.num_goals and not problem.verify:
        raise ValueError("nothing is checked; give verify, or checks that aren't guards")
    done = verdict.guarded and verdict.num_held == verdict.num_goals
    if done and not problem.verify and not problem.setup.strip():
        raise ValueError("every check holds before anything is done; mark such checks as guard")
