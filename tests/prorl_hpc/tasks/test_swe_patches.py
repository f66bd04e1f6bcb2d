"""Patches from an untrusted side: what is kept of them, and what is refused."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_hpc.tasks.swe.patches import PatchError, Rule, filter_patch, read_patch

ADDED = """\
diff --git a/{0} b/{0}
new file mode {1}
index 0000000..1111111
--- /dev/null
+++ b/{0}
@@ -0,0 +1 @@
+x = 1
"""
ANYWHERE = Rule(tests=("checks", "one_test_file.py"), sources=())
INSIDE = Rule(tests=("src/pkg/tests",), sources=("src/pkg",))


def added(path: str, mode: str = "100644") -> bytes:
    return ADDED.format(path, mode).encode()


@pytest.mark.parametrize(
    "path",
    [
        "conftest.py", "pkg/conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg",
        "pyproject.toml", "sitecustomize.py", "pkg/usercustomize.py", "evil.pth", "pytest.py",
        "pytest/__init__.py", "_pytest/runner.py", "pluggy.py", "unittest/__init__.py",
        "pkg/__pycache__/m.cpython-311.pyc", "checks/test_a.py", "one_test_file.py",
        "lib/site-packages/pkg.py", "tests/test_x.py", "test_x.py", "pkg/x_test.py",
        ".gitattributes", "venv/lib/x.py", "hmac.py", "json/__init__.py", "src/hmac.py",
        "hmac.cpython-311-x86_64-linux-gnu.so", "pytest.abi3.so",
    ],
)  # fmt: skip
def test_what_could_fool_the_score_is_left_out(path: str) -> None:
    found = filter_patch(added(path) + added("pkg/good.py"), ANYWHERE)
    assert found.kept == added("pkg/good.py")
    assert found.left_out == (path,)


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("src/pkg/a.py", True), ("src/pkg/new/b.py", True), ("src/pkg/tests/test_a.py", False),
        ("src/other.py", False), ("src/pkgs.py", False), ("setup.py", False),
        ("src/pkg/conftest.py", False), ("src/sitecustomize.py", False),
    ],
)  # fmt: skip
def test_where_sources_are_known_only_they_count(path: str, counts: bool) -> None:
    assert bool(filter_patch(added(path), INSIDE).kept) == counts


def test_a_module_that_has_a_standard_name_already_may_be_mended() -> None:
    changed = b"""\
diff --git a/dataclasses.py b/dataclasses.py
index 1111111..2222222 100644
--- a/dataclasses.py
+++ b/dataclasses.py
@@ -1 +1 @@
-x = 1
+x = 2
"""
    whole = changed + added("pkg/json.py") + added("code/x.py")
    assert filter_patch(whole, ANYWHERE).left_out == ()


def test_links_and_submodules_do_not_count() -> None:
    for mode in ("120000", "160000"):
        assert filter_patch(added("src/pkg/a.py", mode), INSIDE).kept == b""
    changed = b"diff --git a/src/pkg/l b/src/pkg/l\nindex 1111111..2222222 120000\n"
    assert not read_patch(changed)[0].is_plain


@pytest.mark.parametrize(
    "patch",
    [
        b"hello\n",
        added("src/pkg/a.py").replace(b"+++ b/src/pkg/a.py", b"+++ b/tests/test_a.py"),
        b"diff --git a/x b/y\n",
        b"diff --git a/src/pkg/a b/src/pkg/a\nrename from src/pkg/a\nrename to tests/b\n",
        b"diff --git a/src/pkg/a b/src/pkg/a\n--- a/tests/x\n+++ b/src/pkg/a\n@@ -1 +1 @@\n",
    ],
)
def test_headers_that_contradict_each_other_are_refused(patch: bytes) -> None:
    with pytest.raises(PatchError):
        filter_patch(patch, INSIDE)


def test_a_carriage_return_starts_no_new_part() -> None:
    text = added("src/pkg/a.py") + b"+text\rdiff --git a/x b/x\n"
    assert [part.path for part in read_patch(text)] == ["src/pkg/a.py"]


def test_unusual_names() -> None:
    quoted = b'diff --git "a/src/pkg/\\303\\274 \\"x\\".py" "b/src/pkg/\\303\\274 \\"x\\".py"\n'
    assert read_patch(quoted)[0].path == 'src/pkg/\u00fc "x".py'
    blank = b"diff --git a/src/pkg/a b.py b/src/pkg/a b.py\n--- a/src/pkg/a b.py\t\n"
    assert read_patch(blank)[0].path == "src/pkg/a b.py"


def test_paths_that_leave_the_tree_do_not_count() -> None:
    assert filter_patch(added("src/pkg/../../x.py"), INSIDE).kept == b""


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for text in (data, added("src/pkg/a.py") + data):
        with contextlib.suppress(PatchError):
            assert b"".join(part.data for part in read_patch(text)) in (text, b"")
