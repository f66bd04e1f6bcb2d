"""What is left of every command on damaged runs, unusable paths and odd words: one line, code 2.

Nothing is started: commands that would start jobs only meet runs that are damaged or were moved.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl_hpc.cli import main as frame
from prorl_hpc.cli.main import main
from prorl_hpc.run import Run
from tests.prorl_hpc.cli.support import recipe_directory

READING = (
    ["status", "r"],
    ["status", "r", "--json"],
    ["logs", "r"],
    ["report", "r"],
    ["show", "r", "--group", "0"],
    ["eval", "r"],
    ["eval", "r", "--versions", "all"],
    ["export", "r", "out"],
    ["buffer", "export", "r", "out.jsonl"],
    ["list"],
)
ACTING = (
    ["watch", "r"],
    ["cancel", "r"],
    ["resume", "r"],
    ["scale", "r", "--rollout", "2"],
    ["reset-reference", "r"],
)
GARBAGE = b'\xff\xfe{"a": 1}\n[1]\n{"step": 1e999, "event": "step", "time": null}\n{"event": 3'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never started, made once and copied by each test."""
    directory = tmp_path_factory.mktemp("made")
    groups = recipe_directory(directory / "groups")
    argv = ["submit", "recipe=quickstart", "site=desk", "--recipe-dir", str(groups), "--dry-run"]
    assert main([*argv, f"run_root={directory}", "--name", "r"]) == 0
    return directory / "r"


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return Run(Path(shutil.copytree(made, tmp_path / "runs" / "r")))


def say(argv: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Runs one command; a code of 2 must come with exactly one line."""
    capsys.readouterr()
    code = main(argv)
    err = capsys.readouterr().err
    assert code in (0, 1, 2), (argv, code, err)
    if code == 2:
        assert err.startswith("prorl-hpc: "), (argv, err)
        assert err.count("\n") == 1, (argv, err)
        assert len(err) < 900, (argv, err)
    return code


def content(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    return write


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)


DAMAGE = {"garbage": content(GARBAGE), "empty": content(b""), "directory": directory}
FROZEN = ("recipe.yaml", "plan.json", "site.json")
GROWN = (
    "ledger.jsonl",
    "metrics/learner.jsonl",
    "metrics/buffer.jsonl",
    "metrics/validation.jsonl",
    "buffer/manifest.jsonl",
    "policy/latest",
    "provenance.json",
    "desired/rollout",
)


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", FROZEN)
def test_damaged_frozen_files(
    name: str, how: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGE[how](run.root / name)
    before = run.recipe.read_bytes() if run.recipe.is_file() else b""
    for argv in (*READING, *ACTING):
        code = say(argv, capsys)
        if argv[0] in ("status", "watch", "resume", "scale") and name != "recipe.yaml":
            assert code == 2, argv
    assert not run.ledger.exists()
    if run.recipe.is_file():
        assert run.recipe.read_bytes() == before


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", GROWN)
def test_damaged_files_that_grow(
    name: str, how: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.root / name
    if path.is_dir():
        shutil.rmtree(path)
    DAMAGE[how](path)
    for argv in READING:
        say(argv, capsys)


@pytest.mark.parametrize("name", ["logs", "policy", "metrics", "requests", "buffer", "scripts"])
def test_file_where_a_directory_is_expected(
    name: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run.root / name, ignore_errors=True)
    (run.root / name).write_text("a file")
    for argv in (*READING, ["reset-reference", "r"], ["watch", "r"]):
        say(argv, capsys)


@pytest.mark.parametrize(
    "name", ["", "-r", "--", "a/b", "../r", "/", ".", "..", "r/", "r\n", "\udcff", "x" * 300, "*"]
)
def test_names_that_are_no_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for argv in (["status"], ["logs"], ["report"], ["cancel"], ["eval"], ["show", "--group", "1"]):
        capsys.readouterr()
        assert main([*argv, name]) == 2
        err = capsys.readouterr().err
        assert "Traceback" not in err
        assert err


def test_moved_run_is_not_started(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["resume", "r"], ["scale", "r", "--rollout", "1"]):
        assert main(argv) == 2
        assert "was moved here from" in capsys.readouterr().err
    assert not run.ledger.exists()


def test_run_that_is_empty_or_deleted_meanwhile(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in run.root.iterdir():
        if path.name != "recipe.yaml":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for argv in (*READING, *ACTING):
        say(argv, capsys)
    shutil.rmtree(run.root)
    for argv in (*READING[:-1], *ACTING):
        assert say(argv, capsys) == 2


@pytest.mark.parametrize(
    "argv",
    [
        ["scale", "r", "--rollout", "-1"],
        ["scale", "r", "--rollout", "1" + "0" * 30],
        ["scale", "r", "--rollout", "nan"],
        ["show", "r", "--group", "-1"],
        ["show", "r", "--group", "9" * 30],
        ["logs", "r", "learner", "-1"],
        ["logs", "r", "../..", "0"],
        ["logs", "r", "learner", "--lines", "-5"],
        ["logs", "r", "learner", "--attempt", "-5"],
        ["eval", "r", "--samples", "0"],
        ["eval", "r", "--samples", "-1"],
        ["eval", "r", "--k", "9"],
        ["eval", "r", "--temperature", "nan"],
        ["eval", "r", "--temperature", "-1"],
        ["eval", "r", "--top-p", "inf"],
        ["eval", "r", "--instances", "-1"],
        ["eval", "r", "--versions", ""],
        ["eval", "r", "--versions", ",1"],
        ["eval", "r", "--versions", "all", "--at-once", "0"],
        ["eval", "r", "--versions", "all", "--hours", "nan"],
        ["export", "r", "."],
        ["export", "r", ""],
        ["export", "r", "none/out"],
        ["report", "r", "--output", "."],
        ["report", "r", "--output", "none/x.html"],
        ["report", "r", "--output", "runs/r/recipe.yaml/x"],
        ["buffer", "export", "r", "."],
        ["buffer"],
        ["list", "nothing"],
        ["list", "recipes", "--recipe-dir", "none"],
        ["sandbox", "exec", "host"],
        ["sandbox", "exec", "none.sif", "--", "true"],
        ["sandbox", "exec", "--timeout", "nan", "host", "--", "true"],
        ["sandbox", "exec", "--timeout", "-1", "host", "--", "true"],
        ["images", "list"],
        ["images", "--store", "none", "verify", "x"],
        ["images", "--store", "runs/r/recipe.yaml", "list"],
        ["doctor", "--write-site", "runs/r/recipe.yaml/x.yaml"],
        ["doctor", "--write-site", "runs/r/recipe.yaml"],
        ["submit"],
        ["submit", "recipe="],
        ["submit", "recipe=quickstart", "steps="],
        ["submit", "recipe=quickstart", "name=", "--dry-run"],
        ["submit", "recipe=quickstart", "--name", "-r", "--dry-run"],
        ["submit", "recipe=quickstart", "=3"],
        ["submit", "recipe=quickstart", "--recipe-dir", "runs/r/recipe.yaml"],
        ["submit", "recipe=quickstart", "run_root=runs/r/recipe.yaml", "--dry-run"],
        ["submit", "recipe=quickstart", "\udcff=1"],
        ["demo", "--seeds", "x"],
        ["demo", "--seeds", "0"],
    ],
    ids=" ".join,
)
def test_odd_words(argv: list[str], run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.rstrip().splitlines()[-1].startswith("prorl-hpc")
    assert run.recipe.is_file()


def command(argv: list[str], *, stdout: int) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(frame.__file__).parents[2])}
    return subprocess.run(
        [sys.executable, "-m", "prorl_hpc.cli", *argv],
        env={**environment, "COLUMNS": "20", "LC_ALL": "C", "PYTHONUTF8": "0"},
        timeout=300, check=False, stdout=stdout, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_closed_pipe_narrow_terminal_and_other_locale(run: Run) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = command(["list", "keys"], stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
    assert command(["eval", "--help"], stdout=subprocess.PIPE).returncode == 0
    odd = Run(run.root.with_name("r\udcff\u00e9"))
    run.root.rename(odd.root)
    listed = command(["list"], stdout=subprocess.PIPE)
    assert (listed.returncode, listed.stderr) == (0, b"")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_run_without_permission(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.root.chmod(0)
    try:
        for argv in READING[:-1]:
            assert say(argv, capsys) == 2
    finally:
        run.root.chmod(0o755)
