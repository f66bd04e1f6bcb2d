"""`prorl-hpc serve` as a job: its script, its start on a site, and what survives a restart."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc.errors import UserError
from prorl_hpc.cli.main import main
from prorl_hpc.run import Run
from prorl_hpc.service import serve
from prorl_hpc.service.client import RolloutClient
from prorl_hpc.service.job import Where, read_where, write_where
from prorl_hpc.service.store import JobStore
from tests.fakes.tiny_model import publish_tiny
from tests.prorl_hpc.cli.support import recipe_directory

BOUND_SECONDS = 280.0
RECIPE = ("recipe=quickstart", "task=chain_sum", "rollout.max_new_tokens=4")

SLURM = """\
# @package site
name: big
backend: slurm
gpu_spelling: gres
placements:
  default: {partition: cpu}
  rollout: {partition: a100, gpu_type: a100, max_walltime_minutes: 60, max_nodes: 2}
"""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    directory = tmp_path / "policy"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def test_a_dry_run_writes_a_script_that_plain_sbatch_runs(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = recipe_directory(tmp_path / "groups")
    (groups / "site" / "big.yaml").write_text(SLURM)
    service = tmp_path / "my service"
    command = ["serve", *RECIPE, "site=big", "--recipe-dir", str(groups), "--port", "8006",
               "rollout.gpus_per_node=2", "rollout.nodes=99", "--policy", str(policy),
               "--dir", str(service / "one")]  # fmt: skip
    assert main([*command, "--dry-run"]) == 0
    out = capsys.readouterr().out
    script = service / "one" / "scripts" / "service.sbatch"
    assert str(script) in out
    text = script.read_text()
    for words in ("--partition=a100", "--gres=gpu:a100:2", "--time=60", "prorl_hpc.service --run",
                  "--requeue", "--signal=B:USR2@"):  # fmt: skip
        assert words in text, words
    assert "--array" not in text
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    where = read_where(Run(service / "one"))
    assert (where.host, where.port, where.policy) == ("0.0.0.0", 8006, policy)
    assert not (service / "one" / "ledger.jsonl").exists()


def test_settings_are_frozen_once_started(tmp_path: Path) -> None:
    run = Run(tmp_path / "service")
    run.root.mkdir()
    where = Where(directory=run.root, policy=tmp_path, socket_path=tmp_path / "s")
    write_where(run, where)
    assert read_where(run) == where
    other = Where(directory=run.root, policy=tmp_path, port=5)
    write_where(run, other)  # not started yet
    run.ledger.write_text("{}\n")
    with pytest.raises(UserError, match="other settings") as caught:
        write_where(run, where)
    assert "prorl-hpc cancel" in str(caught.value)


def test_a_directory_without_a_service(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prorl_hpc.service", "--run", str(tmp_path)],
        capture_output=True, text=True, timeout=BOUND_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.process
def test_a_submitted_service_serves_and_starts_again_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = publish_tiny(Run(tmp_path / "run"), version=0)
    trained = publish_tiny(Run(tmp_path / "run"), version=7)
    groups = recipe_directory(tmp_path / "groups")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    service = tmp_path / "service"
    command = ["serve", *RECIPE, "site=desk", "--recipe-dir", str(groups),
               "rollout.memory_mib=4096", "--policy", str(start), "--dir", str(service),
               "--submit"]  # fmt: skip
    assert main(command) == 0
    try:
        with RolloutClient.at(service, patience_seconds=BOUND_SECONDS) as client:
            assert len(client.rollouts(task="chain_sum", index=0)) == 1
            waiting = client.submit(task="chain_sum", index=1)
            client.load_policy(7, path=trained)
            client.result(waiting)
            assert main(command) == 0  # the same command starts nothing twice
            before = json.loads((service / "service.json").read_text())
            os.kill(before["pid"], signal.SIGUSR2)  # what Slurm sends ahead of the walltime
            until = time.monotonic() + BOUND_SECONDS
            while json.loads((service / "service.json").read_text())["pid"] == before["pid"]:
                assert time.monotonic() < until, list(service.glob("logs/**/out.log"))
                time.sleep(0.1)
            assert client.policy_version() == 7
            assert client.result(waiting)["state"] == "done"
    finally:
        assert main(["cancel", str(service)]) == 0
    until = time.monotonic() + BOUND_SECONDS
    pid = json.loads((service / "service.json").read_text())["pid"]
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_full_disk_does_not_end_the_record_of_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullAtFirst:
        def __init__(self) -> None:
            self.told: list[float] = []

        def record_progress(self, value: float) -> None:
            self.told.append(value)
            if len(self.told) == 1:
                raise OSError(28, "No space left on device")

    async def check() -> list[float]:
        allocation, store = FullAtFirst(), JobStore(tmp_path / "jobs.sqlite")
        store.add("a", request="{}", idempotency_key=None)
        task = asyncio.create_task(serve._record_progress(allocation, store))  # type: ignore[arg-type]
        while len(allocation.told) < 2 and not task.done():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        store.close()
        return allocation.told

    monkeypatch.setattr(serve, "PROGRESS_SECONDS", 0.01)
    assert asyncio.run(asyncio.wait_for(check(), BOUND_SECONDS))[:2] == [1.0, 1.0]
