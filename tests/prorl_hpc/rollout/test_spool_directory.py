"""What a node keeps for its successor is for the same run only, not for the same path."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prorl_hpc.buffer.keys import make_keys
from prorl_hpc.rollout.node import spool_directory
from prorl_hpc.run import Run


def test_a_run_submitted_again_at_the_same_path_finds_nothing_of_its_namesake(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run with 'quotes'")
    make_keys(run)
    first: Any = SimpleNamespace(scratch=tmp_path / "rollout-0" / "1")
    second: Any = SimpleNamespace(scratch=tmp_path / "rollout-0" / "2")
    mine = spool_directory(run, first)
    mine.mkdir(parents=True)
    (mine / "0-1.trajectory").write_bytes(b"1")
    make_keys(run)  # a resume: the keys stay
    assert spool_directory(run, second) == mine
    assert (mine / "0-1.trajectory").exists()
    shutil.rmtree(run.root)
    make_keys(run)
    again = spool_directory(run, first)
    assert again != mine
    assert not mine.exists()
