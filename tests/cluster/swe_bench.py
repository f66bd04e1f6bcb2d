"""A bug of SWE-bench form as its users get it: an image archive with /testbed, and rows of a table.

Writes what `docker save` would, by hand: no Docker is needed. Knows no sandbox.
"""

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

IMAGE = "swebench/sweb.eval.x86_64.adder_1776_adder-1:latest"

BUGGY = "def add(a, b):\n    return a - b\n"
FIXED = "def add(a, b):\n    return a + b\n"
OLD_TEST = "from adder import add\n\n\ndef test_zero():\n    assert add(4, 0) == 4\n"
NEW_TEST = OLD_TEST + (
    "\n\n@pytest.mark.parametrize('b', [1, 2])\ndef test_adds(b):\n    assert add(1, b) == 1 + b\n"
    "\n\ndef test_environment():\n    assert os.environ['TESTBED'] == 'active'\n"
)
PYTHON = '#!/bin/sh\nexport TESTBED=active\nexec /usr/bin/python3 "$@"\n'
"""Stands for the interpreter of the image's own environment."""


def write_archive(rootfs: Path, path: Path, work: Path) -> None:
    """`path` becomes an archive of two layers: the root file system; the repository and its
    interpreter."""
    base, own = work / "base.tar", work / "own.tar"
    subprocess.run(["tar", "-C", str(rootfs), "-cf", str(base), "."], check=True)
    testbed = make_testbed(work / "testbed")
    with tarfile.open(own, "w") as tar:
        tar.add(testbed, "testbed")
        for name in ("python", "python3"):
            info = tarfile.TarInfo(f"opt/miniconda3/envs/testbed/bin/{name}")
            info.size, info.mode = len(PYTHON), 0o755
            tar.addfile(info, io.BytesIO(PYTHON.encode()))
    digests = []
    for layer in (base, own):
        with layer.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
    config = {
        "architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{one}" for one in digests]},
        "history": [{"created_by": "by hand"}] * 2,
    }  # fmt: skip
    packed = json.dumps(config).encode()
    name = f"{hashlib.sha256(packed).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [IMAGE], "Layers": ["base.tar", "own.tar"]}]
    with tarfile.open(path, "w") as tar:
        for entry, data in ((name, packed), ("manifest.json", json.dumps(manifest).encode())):
            info = tarfile.TarInfo(entry)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for layer in (base, own):
            tar.add(layer, layer.name)
    base.unlink()


def make_testbed(root: Path) -> Path:
    """The repository at the commit from which the repair starts."""
    root.mkdir()
    (root / "adder.py").write_text(BUGGY)
    (root / "tests").mkdir()
    (root / "tests" / "test_adder.py").write_text(OLD_TEST)
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "base"]):
        git(root, *arguments)
    return root


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    argv = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def rows(work: Path) -> list[dict[str, Any]]:
    """Two instances of the same bug; the field names and forms of the published tables."""
    root = make_testbed(work / "patches")
    (root / "adder.py").write_text(FIXED)
    patch = git(root, "diff")
    git(root, "checkout", "-q", ".")
    (root / "tests" / "test_adder.py").write_text(f"import os\n\nimport pytest\n{NEW_TEST}")
    test_patch = git(root, "diff")
    name = "tests/test_adder.py"
    row = {
        "repo": "adder/adder", "instance_id": "adder__adder-1", "image_name": IMAGE,
        "base_commit": git(root, "rev-parse", "HEAD").strip(), "patch": patch,
        "test_patch": test_patch, "problem_statement": "`add(1, 2)` gives -1.", "hints_text": "",
        "created_at": "2020-01-01T00:00:00Z", "version": "1.0",
        "FAIL_TO_PASS": json.dumps([f"{name}::test_adds[1]", f"{name}::test_adds[2]"]),
        "PASS_TO_PASS": json.dumps([f"{name}::test_zero", f"{name}::test_environment"]),
        "environment_setup_commit": "",
    }  # fmt: skip
    return [row, row | {"instance_id": "adder__adder-2"}]


def write_tables(rows: list[dict[str, Any]], directory: Path) -> tuple[Path, Path]:
    """The rows as JSON lines and as Parquet."""
    import pyarrow
    from pyarrow import parquet

    lines, columns = directory / "bugs.jsonl", directory / "bugs.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), columns)
    return lines, columns


if __name__ == "__main__":
    import sys

    where = Path(sys.argv[2])
    (where / "work").mkdir()
    write_archive(Path(sys.argv[1]), where / "image.tar", where / "work")
    write_tables(rows(where / "work"), where)
