"""The rollout job as a process of its own, against a real buffer, with a tiny random model."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("torch")
pytest.importorskip("reasoning_gym")

from hpc import endpoints, ledger
from prorl_hpc.buffer.config import BufferConfig
from prorl_hpc.buffer.keys import make_keys
from prorl_hpc.buffer.mixture import TaskShare
from prorl_hpc.buffer.reader import GroupReader
from prorl_hpc.observe.metrics import last_row
from prorl_hpc.policy import verify_policy
from prorl_hpc.recipe import dump_recipe
from prorl_hpc.run import Run
from tests.fakes.tiny_model import publish_tiny
from tests.prorl_hpc.buffer.buffer_helpers import Running, wait_for
from tests.prorl_hpc.rollout.helpers import make_recipe

pytestmark = pytest.mark.process

DEADLINE_SECONDS = 400


def buffer_config(**changes):
    values = {
        "tasks": {"sums": TaskShare(weight=1.0, train_size=1000)},
        "num_rollouts": 4,
        "batch_groups": 2,
        "max_staleness": 1,
        "seed": 7,
        "min_usable": 2,
        "group_deadline_seconds": 600.0,
        "lease_seconds": 10.0,
        "max_infrastructure_retries": 2,
        "deterministic": False,
    }
    return BufferConfig(**(values | changes))


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "test")
    run.root.mkdir()
    make_keys(run)
    run.recipe.write_text(dump_recipe(make_recipe()))
    return run


@contextmanager
def buffer_of(run, **changes):
    buffer = Running(run, config=buffer_config(**changes))
    port = int(buffer.address.rpartition(":")[2])
    endpoint = endpoints.Endpoint(
        run=run.name, role="buffer", host="127.0.0.1", port=port, public_key="", attempt=1,
        published=time.time(),
    )  # fmt: skip
    endpoints.publish(run, endpoint=endpoint)
    try:
        yield buffer
    finally:
        buffer.stop()


@contextmanager
def rollout_job(run, tmp_path, *, index=0, attempt=1):
    scratch = tmp_path / f"scratch-{index}" / str(attempt)
    scratch.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "PRORL_RUN_DIR": str(run.root),
        "PRORL_JOB": "rollout",
        "PRORL_ROLE": "rollout",
        "PRORL_INDEX": str(index),
        "PRORL_ATTEMPT": str(attempt),
        "PRORL_SCRATCH": str(scratch),
        "OMP_NUM_THREADS": "1",
    }
    log = (tmp_path / f"rollout-{index}-{attempt}.log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "prorl_hpc.rollout", "--run", str(run.root)],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    process.log = log
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(120)
        log.close()


def text_of(process):
    process.log.seek(0)
    return process.log.read()


def take(learner, num_groups):
    refs = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(refs) < num_groups:
        assert time.monotonic() < deadline, f"only {len(refs)} of {num_groups} groups"
        refs += learner.take(num_groups - len(refs), timeout_seconds=5.0)
    return refs


def follow_versions(run, learner, reader):
    """Publishes versions until a group comes that a newer one sampled; returns the last."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    for version in range(1, 100):
        publish_tiny(run, version=version)
        learner.published(version)
        groups = [reader.read(ref) for ref in take(learner, 2)]
        if any(int(t.versions.max()) > 0 for g in groups for t in g.trajectories):
            return version
        assert time.monotonic() < deadline, "no group of a newer version"
    raise AssertionError("no group of a newer version")


def test_groups_are_made_versions_followed_and_the_end_is_clean(run, tmp_path):
    publish_tiny(run, version=0)
    with buffer_of(run) as buffer, rollout_job(run, tmp_path) as process:
        learner = buffer.learner()
        reader = GroupReader(run)
        for ref in take(learner, 2):
            group = reader.read(ref)
            assert len(group.trajectories) == 4
            for trajectory in group.trajectories:
                assert trajectory.reward is not None
                sampled = trajectory.loss_mask == 1
                assert sampled.any()
                assert (trajectory.versions[sampled] == 0).all()
                assert (trajectory.logprobs[sampled] <= 0).all()
                assert trajectory.worker == "rollout-0"
        newest = follow_versions(run, learner, reader)
        learner.validate(newest, {"sums": 3}, 2)
        found = learner.validation_results(newest, timeout_seconds=DEADLINE_SECONDS)
        assert found is not None
        assert len(found) == 3
        for ref in found:
            for trajectory in reader.read(ref).trajectories:
                sampled = trajectory.loss_mask == 1
                assert (trajectory.versions[sampled] == newest).all()
        learner.finish("enough")
        assert process.wait(DEADLINE_SECONDS) == 0, text_of(process)
        learner.close()
    assert last_row(run.metrics("rollout"))["outcomes"]
    assert verify_policy(run.policy(0)).version == 0


def test_asked_to_stop_it_leaves_with_75_and_its_leases_come_back(run, tmp_path):
    publish_tiny(run, version=0)
    with buffer_of(run) as buffer:
        learner = buffer.learner()
        with rollout_job(run, tmp_path) as process:
            take(learner, 1)
            process.send_signal(signal.SIGUSR2)
            assert process.wait(DEADLINE_SECONDS) == 75, text_of(process)
        wait_for(lambda: learner.status().leases == 0, what="leases to be given back")
        learner.close()


def test_a_finished_run_ends_nodes_that_the_buffer_left_without_a_word(run, tmp_path):
    publish_tiny(run, version=0)
    with buffer_of(run) as buffer, rollout_job(run, tmp_path) as process:
        learner = buffer.learner()
        take(learner, 1)
        learner.close()
        buffer.stop()
        assert process.poll() is None, text_of(process)
        start = {"time": time.time(), "job": "learner", "index": 0, "attempt": 1}
        begun = ledger.Start(**start, role="learner", job_id="1", host="h")
        ledger.append(run.ledger, entry=begun)
        ledger.append(run.ledger, entry=ledger.Exit(**start, code=0, next="finished", reason="."))
        assert process.wait(DEADLINE_SECONDS) == 0, text_of(process)
        with rollout_job(run, tmp_path, attempt=2) as late:
            assert late.wait(DEADLINE_SECONDS) == 0, text_of(late)


def test_a_killed_node_is_replaced_and_nothing_is_lost(run, tmp_path):
    publish_tiny(run, version=0)
    with buffer_of(run) as buffer:
        learner = buffer.learner()
        with rollout_job(run, tmp_path) as process:
            take(learner, 1)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(120)
        with rollout_job(run, tmp_path, attempt=2):
            take(learner, 3)
        learner.close()


def test_deterministic_groups_are_the_same_tokens_again(run, tmp_path):
    recipe = make_recipe()
    recipe.learner.deterministic = True
    recipe.algorithm.max_staleness = 0
    found = []
    for name in ("one", "two"):
        again = Run(tmp_path / name)
        again.root.mkdir()
        make_keys(again)
        again.recipe.write_text(dump_recipe(recipe))
        publish_tiny(again, version=0)
        with (
            buffer_of(again, deterministic=True, max_staleness=0) as buffer,
            rollout_job(again, tmp_path / name),
        ):
            learner = buffer.learner()
            groups = [GroupReader(again).read(ref) for ref in take(learner, 2)]
            learner.close()
        found.append(
            [
                (g.group_id, g.instance_id, t.rollout_index, t.tokens.tolist(), t.logprobs.tolist())
                for g in groups
                for t in g.trajectories
            ]
        )
    assert found[0] == found[1]
    assert len(found[0]) == 8


def test_without_a_policy_it_names_the_learner(run, tmp_path):
    recipe = make_recipe()
    recipe.buffer.peer_seconds = 1.0
    run.recipe.write_text(dump_recipe(recipe))
    with buffer_of(run), rollout_job(run, tmp_path) as process:
        assert process.wait(DEADLINE_SECONDS) == 75
        assert "learner: its job never started" in text_of(process)


def test_a_prompt_outside_the_vocabulary_is_one_line_and_exit_2(run, tmp_path):
    recipe = make_recipe()
    recipe.tasks["sums"].system_prompt = "größer"
    run.recipe.write_text(dump_recipe(recipe))
    publish_tiny(run, version=0)
    with buffer_of(run), rollout_job(run, tmp_path) as process:
        assert process.wait(DEADLINE_SECONDS) == 2
        assert "model.vocabulary" in text_of(process)
        assert "Traceback" not in text_of(process)
