"""A run that was written by a dry run and never started."""

from pathlib import Path

import pytest

from prorl_hpc.cli.main import main
from prorl_hpc.run import Run
from tests.prorl_hpc.cli.support import recipe_directory


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    groups = recipe_directory(tmp_path / "groups")
    argv = ["submit", "recipe=quickstart", "site=desk", "--recipe-dir", str(groups), "--dry-run"]
    assert main(argv) == 0
    return Run(tmp_path / "runs" / "quickstart")
