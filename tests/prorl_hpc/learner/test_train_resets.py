"""The loop's resets and roll-backs, against a fake buffer."""

from dataclasses import replace
from pathlib import Path

import pytest

from prorl_hpc.buffer.messages import GroupRef
from prorl_hpc.learner.checkpoint import checkpoint_steps, read_state
from prorl_hpc.observe.metrics import read_metrics
from prorl_hpc.policy import latest_version, read_manifest
from prorl_hpc.recipe import Recipe, ResetConfig
from prorl_hpc.records import Group
from tests.fakes.learner_client import FakeClient

from .conftest import make_run, tiny_recipe
from .loop_helpers import after, client, go, told, weights_hash


def test_a_manual_reset_is_obeyed_once(tmp_path: Path) -> None:
    recipe = tiny_recipe(reset=ResetConfig(min_distance_steps=1))
    recipe.steps = 4
    run = make_run(tmp_path / "run", recipe)
    run.requests.mkdir()
    (run.requests / "reset-reference").write_text("please")
    go(run, client(), stop=after(6))
    go(run, client())
    resets = [row for row in read_metrics(run.metrics("learner")) if row["event"] == "reset"]
    assert [(row["step"], row["trigger"]) for row in resets] == [(0, "manual")]


def scored(fake: FakeClient, scores: list[float]) -> FakeClient:
    """The fake whose validations score so, one after the other."""
    left, real = iter(scores), fake.read

    def read(ref: GroupRef) -> Group:
        group = real(ref)
        if ref.group_id >= 1 << 40:
            if ref.group_id == 1 << 40:
                read.score = next(left)  # type: ignore[attr-defined]
            parts = tuple(replace(t, reward=read.score) for t in group.trajectories)  # type: ignore[attr-defined]
            return replace(group, trajectories=parts)
        return group

    fake.read = read  # type: ignore[method-assign]
    return fake


def rolling_back(**settings: object) -> Recipe:
    recipe = tiny_recipe(
        reset=ResetConfig(stall_validations=1, roll_back=True, min_distance_steps=1), **settings
    )
    recipe.steps = 12
    recipe.learner.keep_checkpoints = 1
    return recipe


def test_a_roll_back_publishes_the_best_policy_at_once(tmp_path: Path) -> None:
    """Best at step 5, worse at 10: its checkpoint was kept, its weights become version 11."""
    run = make_run(tmp_path / "run", rolling_back())
    fake = scored(client(), [0.2, 0.9, 0.1, 0.3])
    assert go(run, fake) == "done"
    rows = read_metrics(run.metrics("learner"))
    (row,) = [r for r in rows if r["event"] == "reset"]
    assert (row["step"], row["trigger"], row["roll_back_step"]) == (10, "stall", 5)
    (back,) = [r for r in rows if r["event"] == "roll_back"]
    assert (back["step"], back["to_step"], back["version"], back["problem"]) == (10, 5, 11, "")
    assert told(fake, "published") == list(range(1, 14))
    # As many groups may be leased as before: the 8 that version 11 allows are taken off again.
    assert fake.calls[fake.calls.index(("published", 11)) - 1] == ("filtered", -8)
    assert told(fake, "validate") == [0, 5, 10, 13]
    assert checkpoint_steps(run) == [5, 12]
    end = read_state(run.checkpoint(12))
    assert (end.version, end.roll_backs, latest_version(run)) == (13, 1, 13)
    assert list(end.consumed.ranges) == [(0, 96)]
    assert read_manifest(run.policy(13)).step == 12


def test_the_weights_of_a_roll_back_are_those_of_the_best_step(tmp_path: Path) -> None:
    recipe = rolling_back()
    recipe.steps, recipe.learner.keep_policies = 10, 20
    run = make_run(tmp_path / "run", recipe)
    assert go(run, scored(client(), [0.2, 0.9, 0.1])) == "done"
    assert weights_hash(run, 11) == weights_hash(run, 5) != weights_hash(run, 10)
    # A later attempt stands at the same version.
    again = client()
    assert go(run, again) == "done"
    assert told(again, "announce") == [(11, 80, -8, 10)]
    assert latest_version(run) == 11


@pytest.mark.parametrize("best", [0, 5])
def test_a_roll_back_that_cannot_be_done_is_recorded(tmp_path: Path, best: int) -> None:
    """Step 0 has no checkpoint, but is the starting policy; a damaged one is left alone."""
    recipe = rolling_back()
    recipe.steps, recipe.learner.keep_policies = 10, 20
    run = make_run(tmp_path / "run", recipe)
    fake = scored(client(), [0.9 if best == 0 else 0.1, 0.2 if best == 0 else 0.9, 0.1])

    def damage(step: int, consumed: object) -> None:
        if step == 8 and best == 5:
            (run.checkpoint(5) / "learner.json").write_text("{}")

    fake.checkpointed = damage  # type: ignore[method-assign]
    assert go(run, fake) == "done"
    backs = [r for r in read_metrics(run.metrics("learner")) if r["event"] == "roll_back"]
    if best == 0:
        assert (backs[0]["step"], backs[0]["version"], backs[0]["problem"]) == (5, 6, "")
        assert weights_hash(run, 6) == weights_hash(run, 0)
    else:
        (back,) = backs
        assert "learner.json is missing or differs" in back["problem"]
        assert latest_version(run) == 10
