"""What an agent leaves, as bytes: archives of every kind, checks over them, links that lead out."""

import contextlib
import gzip
import hashlib
import io
import tarfile
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_hpc.tasks.cli.checks import Check, holds, judge, same_json
from prorl_hpc.tasks.cli.state import (
    BLOCK,
    MAX_ENTRIES,
    Entry,
    EntryKind,
    StateError,
    confined,
    leads_out,
    pack,
    read_state,
)

WORK = "/w"


def file(data: bytes = b"", mode: int = 0o644) -> Entry:
    return Entry(kind=EntryKind.file, data=data, mode=mode)


def link(target: str) -> Entry:
    return Entry(kind=EntryKind.link, target=target, mode=0o777)


DIRECTORY = Entry(kind=EntryKind.directory, mode=0o755)

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1,
                max_size=120).filter(lambda name: name not in (".", ".."))  # fmt: skip
ENTRIES = st.one_of(
    st.builds(
        lambda data, mode: file(data, mode), st.binary(max_size=1500), st.integers(0, 0o7777)
    ),
    st.builds(link, st.text("abc/.", min_size=1, max_size=200)),
    st.just(DIRECTORY),
)


@given(st.dictionaries(NAMES, ENTRIES, max_size=8))
def test_what_is_packed_is_read(entries: dict[str, Entry]) -> None:
    state = {f"{WORK}/{name}": entry for name, entry in entries.items()}
    assert read_state(pack(state)) == state


@given(st.binary(max_size=4 * BLOCK))
def test_any_bytes_are_a_state_or_refused(data: bytes) -> None:
    with contextlib.suppress(StateError):
        read_state(data)


@given(st.integers(0, 3 * BLOCK), st.integers(0, 255))
def test_a_changed_archive_is_read_or_refused(place: int, byte: int) -> None:
    data = bytearray(pack({"/w/a": file(b"x" * 600), "/w/b": link("a")}))
    data[place] = byte
    with contextlib.suppress(StateError):
        read_state(bytes(data))


def test_what_tar_makes_is_read_and_devices_are_left_out() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind in (("./w/pipe", tarfile.FIFOTYPE), ("./w/null", tarfile.CHRTYPE)):
            info = tarfile.TarInfo(name)
            info.type = kind
            tar.addfile(info)
        info = tarfile.TarInfo(f"./w/{'d' * 90}/{'n' * 90}")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
        bad = tarfile.TarInfo("../../etc/passwd")
        tar.addfile(bad)
    assert read_state(stream.getvalue()) == {f"/w/{'d' * 90}/{'n' * 90}": file(b"abc")}


@pytest.mark.parametrize(
    ("target", "out"),
    [
        ("a.txt", False), ("/w/a.txt", False), ("../w/a.txt", False), ("d/../a.txt", False),
        ("../secret", True), ("/tmp/.verify/expected", True), ("/proc/self/cwd/expected", True),
        # `d/e/root` is a link to /w: from there, `..` is the root
        ("./" * 2000 + "a.txt", True),
        ("d/e/root/../secret", True), ("loop", True), ("..", True), ("d/e/root/a.txt", False),
    ],
)  # fmt: skip
def test_links_that_lead_out(target: str, out: bool) -> None:
    state = {
        WORK: DIRECTORY, "/w/d": DIRECTORY, "/w/d/e": DIRECTORY, "/w/d/e/root": link("/w"),
        "/w/loop": link("loop"), "/w/here": link(target),
    }  # fmt: skip
    assert leads_out("/w/here", state, [WORK]) is out
    assert ("/w/here" in confined(state, [WORK])) is not out


def test_only_what_a_tree_can_hold_is_laid_out() -> None:
    state = {
        WORK: DIRECTORY, "/w/a": file(), "/w/l": link("a"), "/w/l/inside": file(),
        "/w/a/inside": file(), "/w/gone/x": file(), "/etc/passwd": file(), "/wide": file(),
    }  # fmt: skip
    assert set(confined(state, [WORK])) == {WORK, "/w/a", "/w/l"}
    assert confined({WORK: link("/etc"), "/w/passwd": file()}, [WORK]) == {}


def check(**fields: Any) -> Check:
    return msgspec.convert(fields, Check)


STATE = {
    WORK: DIRECTORY, "/w/t": file(b"a\nb  \n\n"), "/w/n": file(b" 12\n"), "/w/x": file(b"", 0o640),
    "/w/j": file(b'{"a": [1, true]}'), "/w/l": link("t"), "/w/d": DIRECTORY, "/w/d/f": file(b"f"),
    "/w/d/g": link("f"), "/w/bad": file(b"\xff\xfe NaN"),
}  # fmt: skip
F = hashlib.sha256(b"f").hexdigest()


@pytest.mark.parametrize(
    ("fields", "true"),
    [
        ({"check": "text", "path": "t", "text": "a\nb"}, True),
        ({"check": "text", "path": "/w/t", "text": "a\nb\n"}, True),
        ({"check": "text", "path": "t", "text": " a\nb"}, False),
        ({"check": "text", "path": "l", "text": "a\nb"}, False),  # a link isn't a file
        ({"check": "lines", "path": "t", "lines": ["b", "a"]}, False),
        ({"check": "lines", "path": "t", "lines": ["b", "a"], "ordered": False}, True),
        ({"check": "number", "path": "n", "number": 12}, True),
        ({"check": "number", "path": "n", "number": 12.4, "tolerance": 0.5}, True),
        ({"check": "number", "path": "n", "number": 12.4}, False),
        ({"check": "number", "path": "bad", "number": 0}, False),
        ({"check": "json", "path": "j", "value": {"a": [1, True]}}, True),
        ({"check": "json", "path": "j", "value": {"a": [True, True]}}, False),
        ({"check": "json", "path": "bad", "value": None}, False),
        ({"check": "contains", "path": "t", "text": "b"}, True),
        ({"check": "contains", "path": "t", "text": "z", "absent": True}, True),
        ({"check": "contains", "path": "gone", "text": "z", "absent": True}, False),
        ({"check": "exists", "path": "t"}, True),
        ({"check": "exists", "path": "d", "kind": "directory"}, True),
        ({"check": "exists", "path": "d"}, False),
        ({"check": "absent", "path": "gone"}, True),
        ({"check": "absent", "path": "l"}, False),
        ({"check": "mode", "path": "x", "mode": "640"}, True),
        ({"check": "mode", "path": "x", "mode": "644"}, False),
        ({"check": "mode", "path": "l", "mode": "777"}, False),
        ({"check": "link", "path": "l", "target": "t"}, True),
        ({"check": "link", "path": "t", "target": "t"}, False),
        ({"check": "sha256", "path": "d/f", "sha256": F.upper()}, True),
        ({"check": "names", "path": "d", "names": ["g", "f"]}, True),
        ({"check": "names", "path": "d", "names": ["f"]}, False),
        ({"check": "archive", "path": "d/f", "files": {}}, False),
        ({"check": "exists", "path": "../etc/passwd"}, False),
    ],
)
def test_checks(fields: dict[str, Any], true: bool) -> None:
    assert holds(check(**fields), STATE, directory=WORK) is true


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_archives_are_read_and_bombs_are_not(compress: Any) -> None:
    wanted = check(check="archive", path="a", files={"f": F})
    packed = compress(pack({"/f": file(b"f")}))
    assert holds(wanted, {"/w/a": file(packed)}, directory=WORK)
    bomb = gzip.compress(b"\0" * (65 << 20))
    for wrong in (packed[: len(packed) // 99], b"\x1f\x8b" + packed, b"", b"f", bomb):
        assert not holds(wanted, {"/w/a": file(wrong)}, directory=WORK)


def test_a_guard_earns_nothing_and_its_loss_is_told() -> None:
    checks = [
        check(check="exists", path="t", guard=True), check(check="exists", path="n"),
        check(check="exists", path="gone"),
    ]  # fmt: skip
    verdict = judge(checks, STATE, directory=WORK)
    assert (verdict.guarded, verdict.num_held, verdict.num_goals) == (True, 1, 2)
    assert not judge(checks, {}, directory=WORK).guarded


@pytest.mark.parametrize(
    "fields",
    [
        {"check": "exists"}, {"check": "unknown", "path": "a"}, {"path": "a"},
        {"check": "mode", "path": "a", "mode": "rwx"}, {"check": "exists", "path": "a", "more": 1},
    ],
)  # fmt: skip
def test_checks_that_are_none(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        check(**fields)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=2), inside),
    max_leaves=8,
)


@given(VALUES, VALUES)
def test_json_is_the_same_when_its_text_is(one: Any, two: Any) -> None:
    assert same_json(one, one)
    texts = [msgspec.json.encode(value, order="deterministic") for value in (one, two)]
    assert same_json(one, two) is (texts[0] == texts[1])


def test_archives_of_too_many_files_are_refused() -> None:
    state = {f"/w/{number}": link("/w/" + "./" * 50) for number in range(MAX_ENTRIES)}
    data = pack(state)
    assert len(confined(read_state(data), [WORK])) == MAX_ENTRIES
    state["/w/more"] = file()
    with pytest.raises(StateError, match="more than"):
        read_state(pack(state))
