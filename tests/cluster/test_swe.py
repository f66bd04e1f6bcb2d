"""recipe=swe on a real Slurm with real containers: two real bugs, a rollout array of two nodes."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpc.files import asset_directory
from prorl_hpc.agents.replay import DESTRUCTIVE

pytestmark = pytest.mark.timeout(1800)

CHOSEN = ("xmltodict-1.0.3", "cachetools-7.2.1")


class Site:
    """What one ordinary user sees of the cluster: a store of images, a store of instances."""

    def __init__(self, cluster: Any, apptainer: Any) -> None:
        self.cluster = cluster
        self.root: Path = cluster.user.new_directory("swe")
        lines = (asset_directory("recipes") / "data/pypi_bugs.jsonl").read_text().splitlines()
        rows = [line for line in lines if json.loads(line)["instance_id"] in CHOSEN]
        self.data = self.root / "bugs.jsonl"
        self._write(self.data, "\n".join(rows) + "\n")
        self.env = {
            "PRORL_IMAGES": str(self.root / "images"), "PRORL_INSTANCES": str(self.root / "store")
        }  # fmt: skip
        self.overrides = (
            "recipe=swe_rehearsal", "site=minicluster", f"run_root={self.root / 'runs'}",
            f"tasks.swe.data={self.data}",
        )  # fmt: skip
        done = self.call("images", "import", "swe", str(apptainer.sif))
        assert done.returncode == 0, done.stderr

    def call(self, *arguments: str, timeout: float = 1000.0) -> Any:
        argv = ["python", "-m", "prorl_hpc.cli", *arguments]
        return self.cluster.run(argv, cwd=self.root, env=self.env, timeout=timeout)

    def read(self, path: Path) -> list[dict[str, Any]]:
        done = self.cluster.run(["cat", str(path)])
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def _write(self, path: Path, text: str) -> None:
        code = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
        done = self.cluster.run(["python", "-c", code, str(path), text])
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def site(cluster: Any, apptainer: Any) -> Site:
    site = Site(cluster, apptainer)
    done = site.call("instances", "build", *site.overrides)
    if "pip can't fetch" in done.stdout or "pip says" in done.stdout:
        pytest.skip(f"no package index to be reached: {done.stdout.strip().splitlines()[0]}")
    assert done.returncode == 0, done.stdout + done.stderr
    return site


@pytest.mark.process
def test_instances_are_checked_over_an_array(site: Site) -> None:
    done = site.call("instances", "validate", *site.overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 instances are fair" in done.stdout
    listed = site.call("instances", "list", *site.overrides)
    assert listed.stdout.count("fair") == 2


@pytest.mark.process
def test_the_recipe_end_to_end(site: Site) -> None:
    run = site.root / "runs" / "bugs"
    done = site.call(
        "submit", *site.overrides, "--name", "bugs", "--wait", "rollout.nodes=2",
        "steps=1", "validation.every_steps=1", "algorithm.batch_groups=1",
    )  # fmt: skip
    logs = site.cluster.run(["bash", "-c", f"tail -n 20 $(find '{run}/logs' -type f)"]).stdout
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    rows = site.read(run / "metrics/learner.jsonl")
    assert any(row.get("event") == "step" and row["step"] == 1 for row in rows), logs
    # the first rollout of a group replays the gold patch, the second nothing
    validated = [row for row in rows if row.get("event") == "validation"]
    assert validated[-1]["score"] == 1.0, validated
    shown = site.call("show", str(run), "--group", "0").stdout
    assert "reward 1" in shown, shown
    assert "reward 0" in shown, shown


@pytest.mark.process
def test_every_attack_ends_as_a_typed_outcome_in_the_buffer(apptainer: Any) -> None:
    script = Path(__file__).resolve().with_name("swe_steps.py")
    done = apptainer.user.run(["python", "-B", str(script), str(apptainer.rootfs)], timeout=1000.0)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    told = found["told"]
    repairs = [told.pop("repair"), told.pop("repair afterwards")]
    assert repairs == ["scored 1 apptainer"] * 2, "neighbours and successors are untouched"
    assert set(told) == set(DESTRUCTIVE)
    # an attack repairs nothing; none is the infrastructure's failure
    assert set(told.values()) <= {"scored 0 apptainer", "invalid 0 apptainer"}, told
    assert (found["host"], found["processes"]) == ("untouched", [])
