"""`prorl-hpc serve` as a process of its own, with a real tiny model and an external trainer."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from prorl_hpc.cli.main import main
from prorl_hpc.run import Run
from prorl_hpc.service.client import RolloutClient, ServiceError
from tests.fakes.tiny_model import publish_tiny

ROOT = Path(__file__).resolve().parents[3]
BOUND_SECONDS = 280.0
RECIPE = ("recipe=quickstart", "task=chain_sum", "rollout.max_new_tokens=4")


@contextmanager
def served(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "prorl_hpc.cli", "serve", *RECIPE, *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(BOUND_SECONDS)
        finally:
            process.kill()


def wait_for(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + BOUND_SECONDS
    while not path.exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


def example() -> ModuleType:
    path = ROOT / "examples" / "external_trainer.py"
    spec = importlib.util.spec_from_file_location("external_trainer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.process
def test_the_external_trainer_of_the_documentation_trains(tmp_path: Path) -> None:
    policy = publish_tiny(Run(tmp_path / "run"), version=0)
    service, log = tmp_path / "service", tmp_path / "log"
    with served("--policy", str(policy), "--dir", str(service), log=log) as process:
        wait_for(service / "service.json", process, log)
        history: list[float] = example().train(policy, service, steps=2, groups=2, num_samples=3)
        assert len(history) == 2
        assert all(0.0 <= reward <= 1.0 for reward in history)
        url = json.loads((service / "service.json").read_text())["url"]
        with RolloutClient(url, token=(service / "token").read_text()) as client:
            samples: list[dict[str, Any]] = client.rollouts(task="chain_sum", index=0)
            sampled = [v for v in samples[0]["versions"] if v >= 0]
            assert set(sampled) == {2}
        with RolloutClient(url, token="wrong") as client, pytest.raises(ServiceError) as caught:
            client.tasks()
        assert caught.value.status == 401
        assert (service / "token").stat().st_mode & 0o077 == 0
    assert process.returncode == 0, log.read_text()


@pytest.mark.process
def test_a_unix_socket_is_private_and_needs_no_token(tmp_path: Path) -> None:
    policy = publish_tiny(Run(tmp_path / "run"), version=5)
    service, log, path = tmp_path / "service", tmp_path / "log", tmp_path / "s"
    arguments = ("--policy", str(policy), "--dir", str(service), "--socket", str(path))
    with served(*arguments, log=log) as process:
        wait_for(service / "service.json", process, log)
        assert path.stat().st_mode & 0o077 == 0
        with RolloutClient(f"unix:{path}") as client:
            (task,) = client.tasks()
            assert task["name"] == "chain_sum"
            samples = client.rollouts(task="chain_sum", index=1, num_samples=2)
            assert len(samples) == 2
    assert process.returncode == 0, log.read_text()
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no model to serve"),
        (("inference.placement=own_jobs", "--policy", "POLICY"), "placement=own_jobs: a service"),
        (("--policy", "/nowhere"), "no model to serve: /nowhere"),
        (("--port", "70000", "--policy", "POLICY"), "--port 70000"),
        (("--policy", "POLICY"), "tokenizer of model.path="),
        (("--policy", "POLICY", "--callback-host", "http://x"), "isn't HOST or HOST:PORT"),
        (("--policy", "POLICY", "--dry-run", "--submit"), "not allowed with"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = [str(tmp_path) if a == "POLICY" else a for a in arguments]
    done = subprocess.run(
        [sys.executable, "-m", "prorl_hpc.cli", "serve", *RECIPE, *given],
        cwd=ROOT, capture_output=True, text=True, timeout=BOUND_SECONDS, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    if "usage" not in done.stderr:
        assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.process
def test_what_only_the_start_can_tell_is_one_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = publish_tiny(Run(tmp_path / "run"), version=0)
    base = ["serve", *RECIPE, "--dir", str(tmp_path / "service"), "--policy", str(policy)]

    def refused(*more: str) -> str:
        capsys.readouterr()
        assert main([*base, *more]) == 2
        text = capsys.readouterr().err
        assert "Traceback" not in text
        return text.strip().splitlines()[-1]

    nobody = ("rollout.engine.kind=openai", "rollout.engine.urls=[http://127.0.0.1:1]")
    assert "engine can't start: http://127.0.0.1:1" in refused(*nobody)
    never = ("rollout.engine.kind=vllm", "rollout.engine.python=/bin/false")
    assert "before it was well" in refused(*never)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "choose another one" in refused("--port", str(taken.getsockname()[1]))
    (policy / "model.safetensors").write_bytes(b"not weights")
    assert "model.safetensors" in refused()
    assert not (tmp_path / "service" / "service.json").exists()
