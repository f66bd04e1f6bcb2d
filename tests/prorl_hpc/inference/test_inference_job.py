"""The inference job as a process, with servers of vLLM's interface (a fake) inside it."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from hpc import ledger
from prorl_hpc.choices import EngineKind, InferencePlacement
from prorl_hpc.inference.announce import load_token, make_token, read, read_all
from prorl_hpc.inference.engine import Completion, Sampling
from prorl_hpc.inference.remote import RemoteServer
from prorl_hpc.policy import publish_policy
from prorl_hpc.recipe import EngineConfig, InferenceConfig, dump_recipe
from prorl_hpc.run import Run
from tests.fakes import vllm_server
from tests.fakes.vllm_server import token_of
from tests.prorl_hpc.rollout.helpers import make_recipe

pytestmark = pytest.mark.process

DEADLINE_SECONDS = 400.0
SAMPLING = Sampling(temperature=1.0, max_new_tokens=4, seed=3)


def wait(ready: Callable[[], object], *, what: str) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not ready():
        assert time.monotonic() < until, f"waited in vain: {what}"
        time.sleep(0.02)


def publish(run: Run, version: int) -> None:
    def write(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        config = {"hidden_size": 64, "num_attention_heads": 2}
        (directory / "config.json").write_bytes(msgspec.json.encode(config))

    publish_policy(run, version=version, step=version, write=write)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose inference jobs start one server each, under an interpreter of its own."""
    python = tmp_path / "fake python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{vllm_server.__file__}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    run = Run(tmp_path / "test")
    run.root.mkdir()
    recipe = make_recipe(engine=EngineConfig(kind=EngineKind.vllm, python=str(python)))
    recipe.inference = InferenceConfig(placement=InferencePlacement.own_jobs)
    run.recipe.write_text(dump_recipe(recipe))
    make_token(run)
    publish(run, 0)
    return run


@contextmanager
def job(run: Run, tmp_path: Path, *, attempt: int = 1) -> Iterator["subprocess.Popen[bytes]"]:
    scratch = tmp_path / f"scratch-{attempt}"
    scratch.mkdir()
    environment = os.environ | {
        "PRORL_RUN_DIR": str(run.root),
        "PRORL_JOB": "inference",
        "PRORL_ROLE": "inference",
        "PRORL_INDEX": "0",
        "PRORL_ATTEMPT": str(attempt),
        "PRORL_SCRATCH": str(scratch),
        "PRORL_LOGS": str(tmp_path / f"logs-{attempt}"),
        "PRORL_GRACE_SECONDS": "60",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "prorl_hpc.inference", "--run", str(run.root)],
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(120)


def ask(run: Run, sampling: Sampling) -> Completion:
    """One request to the announced server."""

    async def one() -> Completion:
        announcement = read(run, 0)
        assert announcement is not None
        server = RemoteServer(
            announcement,
            token=load_token(run),
            request_seconds=120.0,
            newest=lambda: -1,
            heard=lambda *_: None,
            drains=lambda _: None,
        )
        try:
            await server.check()
            return await server.generate((1, 2), sampling=sampling)
        finally:
            await server.close()

    return asyncio.run(one())


def tokens(version: int) -> tuple[int, ...]:
    return tuple(token_of(seed=3, place=place, version=str(version)) for place in range(4))


def test_it_serves_follows_versions_and_leaves_in_good_order(run: Run, tmp_path: Path) -> None:
    with job(run, tmp_path) as process:
        wait(lambda: read_all(run), what="it is announced")
        first = ask(run, SAMPLING)
        assert (first.token_ids, first.versions) == (tokens(0), (0,) * 4)
        publish(run, 1)
        wait(lambda: ask(run, SAMPLING).versions == (1,) * 4, what="it follows the new version")
        assert ask(run, SAMPLING).token_ids == tokens(1)
        wait(lambda: (found := read(run, 0)) and found.version == 1, what="it says so")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 75
        assert read_all(run) == []
    assert list((tmp_path / "logs-1" / "vllm").iterdir())


def test_a_successor_takes_its_place_and_the_end_of_the_run_ends_it(
    run: Run, tmp_path: Path
) -> None:
    with job(run, tmp_path) as older:
        wait(lambda: read_all(run), what="it is announced")
        with job(run, tmp_path, attempt=2) as newer:
            wait(lambda: (found := read(run, 0)) and found.attempt == 2, what="its successor too")
            assert older.wait(DEADLINE_SECONDS) == 75, "fenced at its next beat"
            assert ask(run, SAMPLING).token_ids == tokens(0)
            for entry in (
                ledger.Start(time=0.0, job="learner", role="learner", index=0, attempt=1,
                             job_id="1", host="h"),
                ledger.Exit(time=0.0, job="learner", index=0, attempt=1, code=0,
                            next="finished", reason="done"),
            ):  # fmt: skip
                ledger.append(run.ledger, entry=entry)
            assert newer.wait(DEADLINE_SECONDS) == 0
            assert read_all(run) == []
