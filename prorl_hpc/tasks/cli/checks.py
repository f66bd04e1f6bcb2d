"""What must be true of the files that an agent leaves. Pure; runs nothing of the agent's.

Each check names a path, absolute or relative to the working directory. A check that is a `guard`
earns nothing: it must hold, and everything is lost where it doesn't. Links are not followed: a
path must itself be what the check asks for.
"""

import gzip
import hashlib
import io
import math
import posixpath
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from prorl_hpc.records import JSON
from prorl_hpc.tasks.cli.state import Entry, EntryKind, State, StateError, read_state

MAX_UNPACKED_BYTES = 64 << 20
"""Of a compressed archive; a larger one is wrong."""

_NUMBER = re.compile(r"[-+]?[0-9]{1,30}(\.[0-9]{0,30})?")


class _Check(msgspec.Struct, frozen=True, kw_only=True, tag_field="check",
             forbid_unknown_fields=True):  # fmt: skip
    path: str
    guard: bool = False


class Text(_Check, frozen=True, kw_only=True, tag="text"):
    """The file's text; blanks at the ends of lines and empty lines at its end don't count."""

    text: str


class Lines(_Check, frozen=True, kw_only=True, tag="lines"):
    """The file's lines, in this order or (`ordered: false`) in any."""

    lines: list[str]
    ordered: bool = True


class Number(_Check, frozen=True, kw_only=True, tag="number"):
    """The file holds one number."""

    number: float
    tolerance: float = 0.0


class Json(_Check, frozen=True, kw_only=True, tag="json"):
    """The file is JSON of this value."""

    value: JSON


class Contains(_Check, frozen=True, kw_only=True, tag="contains"):
    """The text occurs in the file (`absent: true`: it doesn't, and the file is there)."""

    text: str
    absent: bool = False


class Exists(_Check, frozen=True, kw_only=True, tag="exists"):
    """Something of this kind is there."""

    kind: EntryKind = EntryKind.file


class Absent(_Check, frozen=True, kw_only=True, tag="absent"):
    """Nothing is there, not even a broken link."""


class Mode(_Check, frozen=True, kw_only=True, tag="mode"):
    """Permissions, in octal: `640`."""

    mode: str

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-7]{3,4}", self.mode):
            raise ValueError(f"mode={self.mode!r} isn't octal like 640")


class Link(_Check, frozen=True, kw_only=True, tag="link"):
    """A symbolic link with this target, as written."""

    target: str


class Digest(_Check, frozen=True, kw_only=True, tag="sha256"):
    """The file's content by its SHA-256, in hexadecimal."""

    sha256: str


class Names(_Check, frozen=True, kw_only=True, tag="names"):
    """All files and links below a directory, relative to it, and no others."""

    names: list[str]


class Archive(_Check, frozen=True, kw_only=True, tag="archive"):
    """A .tar or .tar.gz with exactly these files: name to SHA-256 of its content."""

    files: dict[str, str]


Check = (
    Text | Lines | Number | Json | Contains | Exists | Absent | Mode | Link | Digest | Names
    | Archive
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the checks said."""

    guarded: bool
    """Every guard held."""
    num_held: int
    """Checks that aren't guards, and held."""
    num_goals: int


def judge(checks: Sequence[Check], state: State, *, directory: str) -> Verdict:
    """All checks over one state."""
    goals = [check for check in checks if not check.guard]
    return Verdict(
        guarded=all(holds(c, state, directory=directory) for c in checks if c.guard),
        num_held=sum(holds(check, state, directory=directory) for check in goals),
        num_goals=len(goals),
    )


def holds(check: Check, state: State, *, directory: str) -> bool:
    """Whether one check is true; whatever the files hold, this is an answer and no error."""
    path = posixpath.normpath(posixpath.join(directory, check.path))
    entry = state.get(path)
    match check:
        case Absent():
            return entry is None
        case Names():
            return _is(entry, EntryKind.directory) and _names(state, path) == sorted(check.names)
        case Exists():
            return _is(entry, check.kind)
        case Link():
            return entry is not None and _is(entry, EntryKind.link) and entry.target == check.target
        case Mode():
            # a link has no permissions of its own
            there = entry is not None and not _is(entry, EntryKind.link)
            return there and entry is not None and entry.mode == int(check.mode, 8)
    if entry is None or not _is(entry, EntryKind.file):
        return False
    return _content_holds(check, entry.data)


def _content_holds(check: Check, data: bytes) -> bool:
    match check:
        case Digest():
            return hashlib.sha256(data).hexdigest() == check.sha256.lower()
        case Archive():
            return _archived(data) == check.files
        case Json():
            return _is_json(data, check.value)
    text = data.decode("utf-8", "replace")
    match check:
        case Text():
            return _lines(text) == _lines(check.text)
        case Lines():
            found, wanted = _lines(text), _lines("\n".join(check.lines))
            return found == wanted if check.ordered else sorted(found) == sorted(wanted)
        case Number():
            return _is_number(text.strip(), check)
        case Contains():
            return (check.text in text) is not check.absent
    raise AssertionError(check)


def _is(entry: Entry | None, kind: EntryKind) -> bool:
    return entry is not None and entry.kind is kind


def _names(state: State, directory: str) -> list[str]:
    start = f"{directory}/"
    return sorted(
        path.removeprefix(start)
        for path, entry in state.items()
        if path.startswith(start) and entry.kind is not EntryKind.directory
    )


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _is_number(text: str, check: Number) -> bool:
    if not _NUMBER.fullmatch(text):
        return False
    return math.isclose(float(text), check.number, rel_tol=1e-12, abs_tol=check.tolerance)


def _is_json(data: bytes, wanted: JSON) -> bool:
    try:
        return same_json(msgspec.json.decode(data), wanted)
    except (msgspec.DecodeError, RecursionError):
        return False


def same_json(one: Any, two: Any) -> bool:
    """Equality of decoded JSON in which true isn't 1; goes no deeper than the shallower of both."""
    if isinstance(one, bool) or isinstance(two, bool):
        return one is two
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same_json(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(same_json, one, two))
    return bool(one == two)


def _archived(data: bytes) -> dict[str, str] | None:
    """Name -> digest of the files in an archive; None for what isn't one."""
    try:
        if data[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
                data = stream.read(MAX_UNPACKED_BYTES + 1)
        if len(data) > MAX_UNPACKED_BYTES:
            return None
        state = read_state(data)
    except (StateError, OSError, EOFError, zlib.error):
        return None
    return {
        path.lstrip("/"): hashlib.sha256(entry.data).hexdigest()
        for path, entry in state.items()
        if entry.kind is EntryKind.file
    }
