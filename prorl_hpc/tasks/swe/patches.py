"""Git patches as text that nobody vouches for: taken apart per file, and only what may count kept.

The agent's patch was made by programs that the agent could have replaced. Each part must name one
and the same plain path in all of its headers; parts that touch tests, test configuration, links or
anything that Python starts by itself are left out. Runs nothing.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import PurePosixPath

from hpc.errors import HpcError

HEADER = b"diff --git "
MODES = (b"new file mode ", b"deleted file mode ", b"old mode ", b"new mode ")
PLAIN_MODES = (b"100644", b"100755")

CONFIGURATION = frozenset(
    {
        "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini",
        "setup.cfg", "pyproject.toml", "sitecustomize.py", "usercustomize.py", ".coveragerc",
        ".gitattributes", ".gitmodules", "noxfile.py",
    }
)  # fmt: skip
"""Files that decide which tests run, how, or what runs before them."""

SHADOWED = frozenset(
    {
        "pytest", "_pytest", "pluggy", "iniconfig", "unittest", "doctest", "sitecustomize",
        "usercustomize", "site-packages", "dist-packages", "__pycache__", ".git", ".venv", "venv",
    }
)  # fmt: skip
"""Directories (or modules) that would stand in for the test runner, or are no source at all."""

STANDARD = frozenset(sys.stdlib_module_names)
"""A new module of such a name, where imports begin, would run before the tests' own reporter."""

IMPORT_ROOTS = ("src", "lib")
"""Directories beside the tree itself from which projects import."""

MODULES = (".py", ".so")

COMPILED = (".pyc", ".pyo", ".pth", ".egg-link")

_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_ESCAPED = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f",
            b"v": b"\v"}  # fmt: skip


class PatchError(HpcError, ValueError):
    """A patch that can't be read, or whose headers contradict each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a patch does to one file."""

    path: str
    data: bytes
    is_plain: bool
    """A regular file before and after; neither a link nor a submodule."""
    is_new: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Which changes count."""

    tests: tuple[str, ...]
    """Files and directories of tests."""
    sources: tuple[str, ...]
    """Where changes must be; empty: anywhere that isn't forbidden."""

    def allows(self, part: Part) -> bool:
        """Whether the part is a change of the program itself."""
        path = PurePosixPath(part.path)
        if not part.is_plain or path.is_absolute() or ".." in path.parts:
            return False
        if is_under(part.path, self.tests) or path.name in CONFIGURATION:
            return False
        if part.path.endswith(COMPILED) or SHADOWED & {*path.parts, _module(path)}:
            return False
        if part.is_new and _stands_for_the_standard_library(path):
            return False
        if self.sources:
            return is_under(part.path, self.sources)
        return not _looks_like_a_test(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Filtered:
    """A patch without what may not count."""

    kept: bytes
    left_out: tuple[str, ...]
    """Paths."""


def filter_patch(data: bytes, rule: Rule) -> Filtered:
    """The parts that count, in their order. Raises PatchError."""
    kept, left_out = [], []
    for part in read_patch(data):
        if rule.allows(part):
            kept.append(part.data)
        else:
            left_out.append(part.path)
    return Filtered(kept=b"".join(kept), left_out=tuple(left_out))


def read_patch(data: bytes) -> list[Part]:
    """The parts of a patch, by file. Raises PatchError."""
    chunks: list[list[bytes]] = []
    for line in _lines(data):
        # inside of hunks each line starts with ' ', '+', '-' or '\': never like this one
        if line.startswith(HEADER):
            chunks.append([line])
        elif chunks:
            chunks[-1].append(line)
        elif line.strip():
            raise PatchError(f"the patch starts with {line[:60]!r} instead of `diff --git`")
    return [_part(lines) for lines in chunks]


def is_under(path: str, places: tuple[str, ...]) -> bool:
    """Whether `path` is one of the files, or in one of the directories."""
    return any(path == place or path.startswith(f"{place}/") for place in places)


def _lines(data: bytes) -> list[bytes]:
    """Lines by \\n alone: git knows no other end."""
    pieces = data.split(b"\n")
    lines = [piece + b"\n" for piece in pieces[:-1]]
    return [*lines, pieces[-1]] if pieces[-1] else lines


def _part(lines: list[bytes]) -> Part:
    path = _header_path(lines[0].rstrip(b"\n")[len(HEADER) :])
    is_plain, is_new = True, False
    for line in lines[1:]:
        text = line.rstrip(b"\n")
        if text.startswith((b"@@", b"GIT binary patch")):
            break
        is_plain &= _check_header(text, path)
        is_new |= text.startswith(b"new file mode ")
    name = path.decode("utf-8", "replace")
    return Part(path=name, data=b"".join(lines), is_plain=is_plain, is_new=is_new)


def _check_header(text: bytes, path: bytes) -> bool:
    """False for modes of links and submodules. Raises PatchError for a second path."""
    word, _, rest = text.partition(b" ")
    if text.startswith((b"--- ", b"+++ ")):
        prefix = b"a/" if text.startswith(b"--- ") else b"b/"
        # git ends names that hold blanks with a tab
        named = _unquoted(rest.removesuffix(b"\t"))
        if named != b"/dev/null" and named != prefix + path:
            raise PatchError(f"a part of {path!r} changes {named!r}")
    elif word in (b"rename", b"copy", b"similarity", b"dissimilarity"):
        if word in (b"rename", b"copy"):
            raise PatchError(f"a part of {path!r} renames or copies; that isn't allowed")
    elif text.startswith(MODES) or (word == b"index" and text.count(b" ") == 2):
        return text.rsplit(b" ", 1)[1] in PLAIN_MODES
    return True


def _header_path(rest: bytes) -> bytes:
    """`a/X b/X`: both halves name the same path, so the middle divides them."""
    middle = len(rest) // 2
    old, new = _unquoted(rest[:middle]), _unquoted(rest[middle + 1 :])
    if rest[middle : middle + 1] != b" " or not old.startswith(b"a/") or new != b"b/" + old[2:]:
        raise PatchError(f"header {rest[:120]!r} doesn't name one path twice")
    return old[2:]


def _unquoted(name: bytes) -> bytes:
    """Takes git's quoting of unusual names back."""
    if not (name.startswith(b'"') and name.endswith(b'"') and len(name) > 1):
        return name

    def plain(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8) & 255]) if len(code) == 3 else _ESCAPED.get(code, code)

    return _ESCAPE.sub(plain, name[1:-1])


def _module(path: PurePosixPath) -> str:
    """`pytest` of `pytest.abi3.so`."""
    return path.name.partition(".")[0]


def _stands_for_the_standard_library(path: PurePosixPath) -> bool:
    """`hmac.py`, `json/__init__.py`: what Python finds before its own."""
    parts = path.parts[1:] if path.parts[0] in IMPORT_ROOTS else path.parts
    is_module = len(parts) == 1 or (len(parts) == 2 and parts[1].startswith("__init__."))
    return is_module and path.suffix in MODULES and _module(PurePosixPath(parts[0])) in STANDARD


def _looks_like_a_test(path: PurePosixPath) -> bool:
    """By the habits of Python projects."""
    directories = {"test", "tests", "testing", "e2e"}
    if directories & set(path.parts[:-1]):
        return True
    return path.suffix == ".py" and (
        path.name.startswith("test_") or path.stem.endswith(("_test", "_tests"))
    )
