"""A shortened quickstart through the command line: every role a process of its own."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("reasoning_gym")

from prorl_hpc.buffer.manifest import Closed, Finished, valid_lines
from prorl_hpc.learner.checkpoint import checkpoint_steps, read_state
from prorl_hpc.observe.history import read_history
from prorl_hpc.policy import latest_version
from prorl_hpc.records import Kind
from prorl_hpc.run import Run

STEPS = 6
OVERRIDES = (
    f"steps={STEPS}",
    "warmup.steps=12",
    "rollout.nodes=1",
    "algorithm.batch_groups=8",
    "algorithm.reset.every_steps=4",
    # Every group trains, whatever the little model happens to write.
    "algorithm.filter_degenerate=false",
    "learner.checkpoint_every_steps=3",
    "validation.every_steps=3",
    "tasks.spell_backward.validation_size=16",
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The finished run, and what the command printed."""
    root = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "prorl_hpc.cli", "demo", "--name", "demo"]
    done = subprocess.run(
        [*command, f"run_root={root}", *OVERRIDES],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return Run(root / "demo"), done.stdout


def test_the_demo_ends_with_a_table_and_what_to_do_next(demo):
    run, printed = demo
    lines = printed.splitlines()
    header = next(line for line in lines if line.startswith("seed"))
    assert header.split() == ["seed", "task", "before", "after", "best", "steps", "resets"]
    assert f"prorl-hpc report {run.root}" in printed


def test_all_steps_are_done_validated_and_published(demo):
    run, _ = demo
    history = read_history(run)
    assert [row["step"] for row in history.steps] == list(range(1, STEPS + 1))
    assert [one.step for one in history.validations] == [0, 3, 6]
    assert all(0.0 <= one.score <= 1.0 for one in history.validations)
    assert latest_version(run) == STEPS
    assert any(isinstance(line, Finished) for line in valid_lines(run.manifest))


def test_the_reference_is_reset_on_schedule(demo):
    run, _ = demo
    assert [reset.step for reset in read_history(run).resets] == [4]
    state = read_state(run.checkpoint(STEPS))
    assert state.reference is not None
    assert state.reference.index == 1


def test_every_group_trains_once(demo):
    run, _ = demo
    assert checkpoint_steps(run)[-1] == STEPS
    consumed = read_state(run.checkpoint(STEPS)).consumed
    closed = [
        line.group
        for line in valid_lines(run.manifest)
        if isinstance(line, Closed) and line.kind is Kind.train
    ]
    assert len(closed) == len(set(closed))
    assert set(consumed) <= set(closed)
    # The steps took as many groups as there are ids in the cursor: none of them twice.
    seen = sum(row["groups_seen"] for row in read_history(run).steps)
    assert seen == len(consumed) >= 8 * STEPS
