"""Rows and images of SWE-bench form, from the archive to the trained step, without a registry."""

from pathlib import Path
from typing import Any

import pytest

from tests.cluster import swe_bench

pytestmark = [pytest.mark.timeout(1800), pytest.mark.process]


class Desk:
    """An ordinary user's directory with an archive, two tables and an empty store."""

    def __init__(self, apptainer: Any) -> None:
        pytest.importorskip("pyarrow")
        self.user = apptainer.user
        self.root: Path = self.user.new_directory("swe-bench")
        script = Path(swe_bench.__file__).resolve()
        made = self.user.run(
            ["python", "-B", str(script), str(apptainer.rootfs), str(self.root)], timeout=600.0
        )
        assert made.returncode == 0, made.stderr
        self.env = {
            "PRORL_IMAGES": str(self.root / "images"),
            "PRORL_INSTANCES": str(self.root / "store"),
        }

    def call(self, *arguments: str, timeout: float = 1000.0) -> Any:
        argv = ["python", "-m", "prorl_hpc.cli", *arguments]
        return self.user.run(argv, cwd=self.root, env=self.env, timeout=timeout)


@pytest.fixture(scope="module")
def desk(apptainer: Any) -> Desk:
    desk = Desk(apptainer)
    plain = swe_bench.IMAGE.replace("/", "_").replace(":", "_")
    done = desk.call("images", "import", plain, str(desk.root / "image.tar"))
    assert done.returncode == 0, done.stdout + done.stderr
    return desk


@pytest.mark.parametrize("table", ["bugs.jsonl", "bugs.parquet"])
def test_the_gold_patch_passes_in_the_images_own_testbed(desk: Desk, table: str) -> None:
    data = f"tasks.swe.data={desk.root / table}"
    only = () if table.endswith("jsonl") else ("--only", "adder__adder-2")
    done = desk.call(
        "instances", "validate", "recipe=swe", data, "tasks.swe.validation_size=1", *only
    )
    assert done.returncode == 0, done.stdout + done.stderr
    number = 1 if only else 2
    assert f"{number} of {number} instances are fair" in done.stdout


def test_a_run_over_the_parquet_table(desk: Desk) -> None:
    runs = desk.root / "runs"
    done = desk.call(
        "submit", "recipe=swe_rehearsal", "site=local", f"run_root={runs}", "--name", "bench",
        f"tasks.swe.data={desk.root / 'bugs.parquet'}", "--wait", "steps=1",
        "validation.every_steps=1", "algorithm.batch_groups=1",
    )  # fmt: skip
    logs = desk.user.run(["bash", "-c", f"tail -n 20 $(find '{runs}' -name '*.log')"]).stdout
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    shown = desk.call("show", str(runs / "bench"), "--group", "0").stdout
    assert "reward 1" in shown, shown
    assert "reward 0" in shown, shown
