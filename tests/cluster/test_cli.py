"""task=cli in real Apptainer containers, as an ordinary user."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.prorl_hpc.tasks.cli_problems import EveryFamily

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.process
def test_every_family_and_a_row_with_scripts(apptainer: Any) -> None:
    script = Path(__file__).resolve().with_name("cli_steps.py")
    done = apptainer.user.run(["python", "-B", str(script), str(apptainer.rootfs)], timeout=1000.0)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    number = len(EveryFamily()._chosen)
    assert told == {
        "solutions": [1.0] * number, "nothing": [0.0], "row": [1.0], "row: nothing": [0.0],
        "trick": [0.0],
    }  # fmt: skip
