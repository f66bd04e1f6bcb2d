"""The files that an agent leaves, as data: read from a tar archive that nobody trusts, and packed.

The archive is made inside the agent's sandbox, so it may hold anything. It is parsed here, in
memory; nothing is unpacked on the host, no link is followed, and no size is believed. Knows no
sandbox and no check.
"""

import io
import posixpath
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

BLOCK = 512
MAX_ENTRIES = 20_000
MAX_STEPS = 256
"""Names that are walked through to follow one link, and the links in its way."""

MODIFIED = 1_700_000_000
"""Time stamp of all packed files, so that equal problems are equal bytes."""


class StateError(ValueError):
    """Bytes that aren't an archive of files."""


class EntryKind(StrEnum):
    """What stands at a path."""

    file = "file"
    directory = "directory"
    link = "link"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One file, directory or symbolic link."""

    kind: EntryKind
    data: bytes = b""
    mode: int = 0o644
    """The twelve permission bits."""
    target: str = ""
    """Of a link, as it is written."""


State = Mapping[str, Entry]
"""Absolute, normalised path -> what stands there."""


def read_state(data: bytes) -> dict[str, Entry]:
    """The entries of a GNU or POSIX tar archive; devices, sockets and the like are left out.

    Of a path that occurs twice the last one counts. Raises StateError.
    """
    state: dict[str, Entry] = {}
    for name, entry in _members(data):
        if len(state) >= MAX_ENTRIES:
            raise StateError(f"more than {MAX_ENTRIES} files")
        path = posixpath.normpath("/" + name.lstrip("/"))
        if ".." not in name.split("/"):
            state[path] = entry
    return state


def _members(data: bytes) -> Iterator[tuple[str, Entry]]:
    """Every step goes forward by a block at least: no archive keeps this busy for ever."""
    place, name, target = 0, b"", b""
    while place + BLOCK <= len(data):
        header = data[place : place + BLOCK]
        if not header.strip(b"\0"):
            return
        size = _octal(header[124:136])
        start = place + BLOCK
        if start + size > len(data):
            raise StateError("the archive ends within a file")
        body, kind = data[start : start + size], header[156:157]
        place = start + (size + BLOCK - 1) // BLOCK * BLOCK
        if kind in (b"L", b"K"):  # GNU: the next member's long name, or its link's target
            text = body.rstrip(b"\0")
            name, target = (text, target) if kind == b"L" else (name, text)
            continue
        found = name or _name(header)
        link = target or header[157:257].partition(b"\0")[0]
        name = target = b""
        entry = _entry(kind, body, mode=_octal(header[100:108]) & 0o7777, target=link)
        if entry is not None:
            yield found.decode("utf-8", "surrogateescape"), entry
    raise StateError("the archive has no end")


def _entry(kind: bytes, body: bytes, *, mode: int, target: bytes) -> Entry | None:
    if kind in (b"0", b"\0", b"7"):
        return Entry(kind=EntryKind.file, data=body, mode=mode)
    if kind == b"5":
        return Entry(kind=EntryKind.directory, mode=mode)
    if kind == b"2":
        text = target.decode("utf-8", "surrogateescape")
        return Entry(kind=EntryKind.link, mode=mode, target=text)
    return None


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if header[257:263] == b"ustar\0" and prefix else name


def _octal(field: bytes) -> int:
    text = field.strip(b"\0 ")
    if not text:
        return 0
    if not text.isdigit() or b"8" in text or b"9" in text:
        raise StateError(f"{field!r} isn't a number of a tar header")
    return int(text, 8)


def pack(state: State) -> bytes:
    """A tar archive of a state, its paths relative to the root; the same bytes for equal states."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(state):
            entry = state[path]
            info = tarfile.TarInfo(path.lstrip("/"))
            info.mode, info.mtime = entry.mode, MODIFIED
            if entry.kind is EntryKind.directory:
                info.type = tarfile.DIRTYPE
            elif entry.kind is EntryKind.link:
                info.type, info.linkname = tarfile.SYMTYPE, entry.target
            else:
                info.size = len(entry.data)
            tar.addfile(info, io.BytesIO(entry.data))
    return stream.getvalue()


def is_below(path: str, roots: Sequence[str]) -> bool:
    """Whether a path is one of `roots` or stands below one."""
    return any(path == root or path.startswith(f"{root}/") for root in roots)


def confined(state: State, roots: Sequence[str]) -> dict[str, Entry]:
    """What may be laid out where hidden files lie: nothing outside of `roots`, no way out of them.

    A link that leads elsewhere (to a verifier's expected output, say) is left out, and so is what
    an archive puts below something that isn't a directory.
    """
    kept: dict[str, Entry] = {}
    for path in sorted(state):  # parents come first
        entry, parent = state[path], posixpath.dirname(path)
        if not is_below(path, roots):
            continue
        if path not in roots and parent not in roots and not _is_directory(kept.get(parent)):
            continue
        if parent in roots and parent in state and not _is_directory(state[parent]):
            continue
        if path in roots and entry.kind is not EntryKind.directory:
            continue
        if entry.kind is EntryKind.link and leads_out(path, state, roots):
            continue
        kept[path] = entry
    return kept


def _is_directory(entry: Entry | None) -> bool:
    return entry is not None and entry.kind is EntryKind.directory


def leads_out(path: str, state: State, roots: Sequence[str]) -> bool:
    """Whether following the link at `path` touches anything outside of `roots`."""
    at = posixpath.dirname(path).strip("/").split("/")
    todo = [*reversed(state[path].target.split("/"))]
    if state[path].target.startswith("/"):
        at = []
    for _ in range(MAX_STEPS):
        if not todo:
            return not is_below("/" + "/".join(at), roots)
        if len(todo) > MAX_STEPS:
            return True
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            at = at[:-1]
            continue
        here = "/" + "/".join([*at, part])
        if not is_below(here, roots) and not any(root.startswith(f"{here}/") for root in roots):
            return True
        entry = state.get(here)
        if entry is None or entry.kind is not EntryKind.link:
            at = [*at, part]
            continue
        at = [] if entry.target.startswith("/") else at
        todo += reversed(entry.target.split("/"))
    return True
