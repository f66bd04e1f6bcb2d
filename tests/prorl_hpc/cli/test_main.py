"""The command line's frame: help, unknown commands, exit codes, and what it must not import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc.errors import UserError
from prorl_hpc import __version__
from prorl_hpc.cli import main as frame
from prorl_hpc.cli.main import COMMANDS, main

HEAVY = ("torch", "transformers", "vllm", "accelerate", "reasoning_gym")
PROBE = """
import sys
from prorl_hpc.cli.main import main
code = main(sys.argv[1:])
heavy = [name for name in {heavy!r} if name in sys.modules]
print("HEAVY", heavy, file=sys.stderr)
sys.exit(code)
"""


def run_probe(arguments: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    root = Path(frame.__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", PROBE.format(heavy=HEAVY), *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["submit", "--help"],
        ["submit", "recipe=quickstart", "--dry-run"],
        ["submit", "recipe=quickstart", "--cfg"],
        ["list"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported_on_a_login_node(arguments: list[str], tmp_path: Path) -> None:
    done = run_probe(arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stderr


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"usage: prorl-hpc {name}" in capsys.readouterr().out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_unknown_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sumbit"]) == 2
    assert capsys.readouterr().err == (
        "prorl-hpc: command 'sumbit' is unknown; did you mean 'submit'?\n"
    )


def test_wrong_option_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--nope"]) == 2
    assert "--nope" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError("field=1 is wrong; give 2"), 2), (KeyboardInterrupt(), 130)],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(frame, "_dispatch", fail)
    assert main(["list"]) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_unexpected_error_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_arguments: list[str]) -> int:
        raise RuntimeError("boom")

    monkeypatch.setattr(frame, "_dispatch", fail)
    with pytest.raises(RuntimeError, match="boom"):
        main(["list"])
    assert "docs/troubleshooting.md" in capsys.readouterr().err
