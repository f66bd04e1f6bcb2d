"""One bug as a data set tells it, in either of two forms. Knows no sandbox, opens no store.

SWE-bench form (SWE-bench, SWE-Gym and relatives): the repository stands in an image, `patch` is
the gold patch and `test_patch` adds the hidden tests. PyPI form: names, versions and hashes of two
source releases, from which `prorl_hpc.tasks.pypi_bugs` makes everything else.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hpc.files import asset_directory
from prorl_hpc.tasks.base import TaskError
from prorl_hpc.tasks.rows import read_rows
from prorl_hpc.tasks.swe.patches import PatchError, Rule, read_patch

PACKAGED = "data/pypi_bugs.jsonl"
PYTEST = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider")


class Form(StrEnum):
    """Where the code of a bug comes from."""

    pypi = "pypi"
    swe_bench = "swe_bench"


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """A source release on the package index."""

    package: str
    version: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PypiFacts:
    """What the PyPI form says beyond the bug itself."""

    buggy: Release
    fixed: Release
    requirements: tuple[str, ...]
    """Complete: installed without their dependencies."""
    source_paths: tuple[str, ...]
    exclude_suffixes: tuple[str, ...]
    buggy_tree: str = ""
    """Git tree of the buggy release, checked when the instance is built; empty: not known."""
    gold_tree: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """One instance, whole."""

    instance_id: str
    statement: str
    form: Form
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    test_command: tuple[str, ...]
    rule: Rule
    """Which of the agent's changes count."""
    pythonpath: str = ""
    """Directory of the repository from which the package is imported; empty: its root."""
    repository: str = ""
    image: str = ""
    """The data set's own name of its image; empty: the task's."""
    patch: str = ""
    test_patch: str = ""
    pypi: PypiFacts | None = None
    extra: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def read_bugs(name: str, data: str | None) -> list[Bug]:
    """All bugs of a file; of the packaged list when `data` is None. Raises TaskError."""
    path = Path(data) if data is not None else asset_directory("recipes") / PACKAGED
    bugs: list[Bug] = []
    seen: set[str] = set()
    for where, row in read_rows(name, path):
        try:
            bug = decode_bug(row)
        except KeyError as err:
            raise TaskError(f"tasks.{name}: {path} {where} has no field {err}") from err
        except (ValueError, TypeError) as err:
            raise TaskError(f"tasks.{name}: {path} {where}: {err}") from err
        if bug.instance_id in seen:
            raise TaskError(f"tasks.{name}: {path} {where}: {bug.instance_id} is there twice")
        seen.add(bug.instance_id)
        bugs.append(bug)
    if not bugs:
        raise TaskError(f"tasks.{name}.data={str(path)!r} holds no instance")
    return bugs


def decode_bug(row: Mapping[str, Any]) -> Bug:
    """A decoded line. Raises KeyError, ValueError or TypeError for a bad one."""
    return _pypi(row) if "buggy_version" in row else _swe_bench(row)


def _pypi(row: Mapping[str, Any]) -> Bug:
    tests = tuple(map(_relative, row["test_paths"]))
    sources = tuple(map(_relative, row["source_paths"]))
    package = _text(row, "package")
    return Bug(
        instance_id=_identity(row),
        statement=_text(row, "problem_statement"),
        form=Form.pypi,
        fail_to_pass=_ids(row["FAIL_TO_PASS"], needed=True),
        pass_to_pass=_ids(row["PASS_TO_PASS"]),
        test_command=tuple(map(str, row["test_command"])),
        rule=Rule(tests=tests, sources=sources),
        pythonpath=_relative(row.get("pythonpath") or ""),
        repository=package,
        pypi=PypiFacts(
            buggy=Release(
                package=package, version=_text(row, "buggy_version"),
                sha256=_text(row, "buggy_sdist_sha256"),
            ),
            fixed=Release(
                package=package, version=_text(row, "fixed_version"),
                sha256=_text(row, "fixed_sdist_sha256"),
            ),
            requirements=tuple(map(str, row["pip_requirements"])),
            source_paths=sources,
            exclude_suffixes=tuple(row.get("exclude_suffixes") or ()),
            buggy_tree=row.get("buggy_tree") or "",
            gold_tree=row.get("gold_tree") or "",
        ),
    )  # fmt: skip


def _swe_bench(row: Mapping[str, Any]) -> Bug:
    test_patch = _text(row, "test_patch")
    try:
        tests = tuple(dict.fromkeys(part.path for part in read_patch(test_patch.encode())))
    except PatchError as err:
        raise ValueError(f"test_patch: {err}") from err
    given = row.get("test_cmd") or row.get("test_command")
    if isinstance(given, str):
        command: tuple[str, ...] = ("bash", "-c", given)
    else:
        # a file that the test patch removes can't be run
        there = [path for path in tests if path.endswith(".py")]
        command = tuple(map(str, given)) if given else (*PYTEST, *there)
    return Bug(
        instance_id=_identity(row),
        statement=_text(row, "problem_statement"),
        form=Form.swe_bench,
        fail_to_pass=_ids(row["FAIL_TO_PASS"], needed=True),
        pass_to_pass=_ids(row["PASS_TO_PASS"]),
        test_command=command,
        rule=Rule(tests=tests, sources=()),
        repository=str(row.get("repo") or ""),
        image=str(row.get("image_name") or row.get("docker_image") or ""),
        patch=str(row.get("patch") or ""),
        test_patch=test_patch,
    )


def _identity(row: Mapping[str, Any]) -> str:
    text = _text(row, "instance_id")
    if "/" in text or text.startswith(".") or "\0" in text:
        raise ValueError(f"instance_id={text!r} can't name a directory")
    return text


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key}={value!r} isn't a text")
    return value


def _ids(value: object, *, needed: bool = False) -> tuple[str, ...]:
    """Test ids: a list, or (as the published data sets have it) a list inside a string."""
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"test ids {value!r} aren't a list of texts")
    if needed and not value:
        raise ValueError("FAIL_TO_PASS is empty; nothing could tell that the bug is gone")
    return tuple(value)


def _relative(path: str) -> str:
    text = str(path).strip("/")
    if ".." in text.split("/") or str(path).startswith("/"):
        raise ValueError(f"path {path!r} leaves the repository")
    return "" if text == "." else text
