"""The loop against a fake buffer: order of things, resume bit for bit, batches."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prorl_hpc.buffer.messages import VALIDATION_BASE, GroupRef
from prorl_hpc.buffer.shard import ShardDamaged
from prorl_hpc.choices import OnExhausted
from prorl_hpc.learner.checkpoint import checkpoint_steps, read_state
from prorl_hpc.learner.collect import TooFewGroups
from prorl_hpc.learner.train import TrainError
from prorl_hpc.learner.validate import read_validations
from prorl_hpc.observe.metrics import read_metrics
from prorl_hpc.policy import latest_version
from prorl_hpc.recipe import StageConfig, dump_recipe
from prorl_hpc.records import Group
from prorl_hpc.run import Run

from .conftest import make_run, tiny_recipe
from .loop_helpers import after, client, go, told, weights_hash


def test_a_whole_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_recipe())
    fake = client()
    assert go(run, fake) == "done"
    assert fake.finished == "all 12 steps are done"
    assert told(fake, "announce") == [(0, 0, 0, 0)]
    assert told(fake, "published") == list(range(1, 13))
    # Every 4 steps, and before each validation (every 5, and the last), where it came first.
    assert told(fake, "checkpointed")[:5] == [4, 5, 8, 10, 12]
    assert told(fake, "validate") == [0, 5, 10, 12]
    assert [line.step for line in read_validations(run.validation)] == [0, 5, 10, 12]
    assert latest_version(run) == 12
    assert checkpoint_steps(run)[-1] == 12
    assert run.progress("learner", index=0).read_text() == "12"
    rows = read_metrics(run.metrics("learner"))
    resets = [row for row in rows if row["event"] == "reset"]
    assert [(row["step"], row["reset_index"]) for row in resets] == [(5, 1), (10, 2)]
    steps = {row["step"]: row for row in rows if row["event"] == "step"}
    assert [steps[step]["kl"] for step in (1, 6, 11)] == [0.0, 0.0, 0.0]
    assert steps[5]["kl"] > 0
    assert steps[3]["tasks"]["letters"]["reward"] == 0.5
    assert list(run.tensorboard.glob("events.*"))
    state = read_state(run.checkpoint(12))
    assert list(state.consumed.ranges) == [(0, 96)]
    assert state.reference is not None
    assert (state.reference.index, state.reference.step) == (2, 10)


@pytest.mark.parametrize("stops", [(3,), (9, 8), (16, 5, 2)])
def test_interrupted_equals_uninterrupted_bit_for_bit(
    tmp_path: Path, stops: tuple[int, ...]
) -> None:
    recipe = tiny_recipe(updates_per_step=2, stages=[StageConfig(from_step=6, context_tokens=32)])
    whole = make_run(tmp_path / "whole", recipe)
    assert go(whole, client()) == "done"
    parts = make_run(tmp_path / "parts", recipe)
    for calls in stops:
        assert go(parts, client(), stop=after(calls)) == "the walltime is near"
    assert go(parts, client()) == "done"
    assert weights_hash(parts, 12) == weights_hash(whole, 12)
    ends = [read_state(run.checkpoint(12)) for run in (whole, parts)]
    assert ends[0].reset == ends[1].reset
    # KL to the reference goes on over each resume as if there had been none.
    kls = [
        {row["step"]: row["kl"] for row in read_metrics(run.metrics("learner")) if "kl" in row}
        for run in (whole, parts)
    ]
    assert kls[0] == kls[1]
    assert len(kls[0]) == 12
    assert ends[0].reference == ends[1].reference


def test_a_crash_between_checkpoints_trains_each_group_once(tmp_path: Path) -> None:
    """Steps 9 to 11 of the lost history leave policies behind; the new one removes them."""
    run = make_run(tmp_path / "run", tiny_recipe())
    fake = client()

    def crash(step: int, consumed: object) -> None:
        if step == 10:
            raise KeyboardInterrupt

    fake.checkpointed = crash  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        go(run, fake)
    (run.checkpoint(10) / "learner.json").unlink()
    again = client()
    assert go(run, again, stop=after(1)) == "the walltime is near"
    assert told(again, "announce") == [(8, 64, 0, 8)]
    assert latest_version(run) == 8
    assert go(run, client()) == "done"
    whole = make_run(tmp_path / "whole", tiny_recipe())
    go(whole, client())
    assert weights_hash(run, 12) == weights_hash(whole, 12)


def test_groups_without_signal_are_replaced_and_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", replace(tiny_recipe(), steps=2))
    fake = client(degenerate=lambda group_id: group_id % 2 == 0)
    assert go(run, fake) == "done"
    # 8 wanted: 4 of ids 0-7, 2 of 8-11, 1 of 12-13, then 14 has none and 15 has: 8 of 0-15.
    rows = [row for row in read_metrics(run.metrics("learner")) if row["event"] == "step"]
    assert [(row["groups_trained"], row["groups_seen"]) for row in rows] == [(8, 16), (8, 16)]
    assert rows[0]["groups_equal_high"] == 8
    assert told(fake, "filtered") == [4, 6, 7, 8, 8, 12, 14, 15, 16, 16]
    assert read_state(run.checkpoint(2)).samples.efficiency == 0.5


def test_a_batch_that_never_fills_is_trained_in_part(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", replace(tiny_recipe(max_refills=1), steps=1))
    fake = client(degenerate=lambda group_id: group_id != 3)
    assert go(run, fake) == "done"
    (row,) = [row for row in read_metrics(run.metrics("learner")) if row["event"] == "step"]
    assert (row["groups_trained"], row["draws"]) == (1, 2)
    # 15 groups were consumed for one step of 8.
    assert told(fake, "filtered")[-1] == 7


def test_a_batch_that_never_fills_is_an_error_where_the_recipe_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_recipe(max_refills=1, on_exhausted=OnExhausted.error))
    fake = client(degenerate=lambda group_id: group_id != 3)
    with pytest.raises(
        TooFewGroups, match=r"step 1: 1 of 15 groups carry .* after 2 draws, 8 wanted; raise"
    ):
        go(run, fake)


def test_no_signal_at_all_ends_with_what_to_change(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_recipe(max_refills=0))
    fake = client(degenerate=lambda group_id: True)
    with pytest.raises(TrainError, match=r"no group carried a signal in 5 steps.*num_rollouts"):
        go(run, fake)


def test_gradients_that_stay_infinite_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prorl_hpc.learner import step

    monkeypatch.setattr(step, "clip_gradients", lambda parameters, limit: float("nan"))
    run = make_run(tmp_path / "run", tiny_recipe())
    with pytest.raises(TrainError, match=r"gradient wasn't finite in 5 steps"):
        go(run, client())


def test_stale_groups_are_dropped_or_kept(tmp_path: Path) -> None:
    for policy, seen in (("drop", 16), ("correct", 8)):
        recipe = tiny_recipe(stale=policy)
        recipe.steps = 2
        recipe.learner.deterministic = False
        run = make_run(tmp_path / policy, recipe)
        fake = client(batch_groups=8)
        real = fake.read

        def read(ref: GroupRef, real: Callable[[GroupRef], Group] = real) -> Group:
            group = real(ref)
            if ref.group_id in range(8, 16):  # as if version 0 had made them
                for t in group.trajectories:
                    t.versions[t.versions > 0] = 0
            return group

        fake.read = read  # type: ignore[method-assign]
        assert go(run, fake) == "done"
        row = [r for r in read_metrics(run.metrics("learner")) if r["event"] == "step"][1]
        assert (row["groups_seen"], row["staleness_max"]) == (seen, 1)


def test_a_damaged_shard_is_reported_and_its_group_taken_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", replace(tiny_recipe(), steps=1))
    fake = client()
    real, damaged = fake.read, []

    def read(ref: GroupRef) -> Group:
        if ref.group_id == 2 and not damaged:
            damaged.append(ref)
            fake.taken.discard(2)
            raise ShardDamaged("shard 7 is damaged", shard=7)
        return real(ref)

    fake.read = read  # type: ignore[method-assign]
    assert go(run, fake) == "done"
    assert told(fake, "damaged") == [(7, 2)]
    assert list(read_state(run.checkpoint(1)).consumed) == list(range(8))


def test_a_damaged_shard_of_a_validation_is_reported_and_read_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", replace(tiny_recipe(), steps=1))
    fake = client()
    real, damaged = fake.read, []

    def read(ref: GroupRef) -> Group:
        if ref.group_id == VALIDATION_BASE + 3 and not damaged:
            damaged.append(ref)
            raise ShardDamaged("shard 7 is damaged", shard=7)
        return real(ref)

    fake.read = read  # type: ignore[method-assign]
    assert go(run, fake) == "done"
    assert told(fake, "damaged") == [(7, VALIDATION_BASE + 3)]
    assert [line.tasks["letters"].instances for line in read_validations(run.validation)] == [8, 8]


def test_it_learns_the_game_from_its_own_samples(tmp_path: Path) -> None:
    """Through publish and reload, as a rollout node would: reward by chance, then nearly 1."""
    recipe = tiny_recipe(num_rollouts=8, kl_coef=0.0, learning_rate=4e-3, max_refills=1)
    recipe.steps = 40
    recipe.validation.every_steps = 100
    run = make_run(tmp_path / "run", recipe)
    fake = client(num_rollouts=8, sampler=PublishedSampler(run))
    assert go(run, fake) == "done"
    rows = [row for row in read_metrics(run.metrics("learner")) if row["event"] == "step"]
    assert sum(row["reward"] for row in rows[:3]) / 3 < 0.4
    assert sum(row["reward"] for row in rows[-3:]) / 3 > 0.8


class PublishedSampler:
    """Log-probabilities of the newest published policy, through transformers."""

    def __init__(self, run: Run) -> None:
        self.run, self.version, self.cache = run, -1, {}

    def __call__(self, prompt: object, seed: int) -> object:
        from transformers import AutoModelForCausalLM

        version = latest_version(self.run)
        assert version is not None
        if version != self.version:
            self.model = AutoModelForCausalLM.from_pretrained(self.run.policy(version))
            self.version, self.cache = version, {}
        key = bytes(prompt)  # type: ignore[call-overload]
        if key not in self.cache:
            ids = torch.tensor(prompt)[None].long()
            with torch.no_grad():
                self.cache[key] = self.model(ids).logits[0, -1].log_softmax(-1).numpy()
        return self.cache[key]


def test_the_recipe_written_to_the_run_is_what_trains(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_recipe())
    assert run.recipe.read_text() == dump_recipe(tiny_recipe())
