"""The benchmark for one GPU runs, at tiny size on CPU; its numbers mean something on a GPU only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.process
def test_it_runs_at_tiny_size() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/learner_h200.py", "--smoke", "--repeats", "1"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    rows = done.stdout.strip().splitlines()
    assert [row.split()[0] for row in rows] == ["shape", "tiny", "tiny"]
