"""The loop against a fake buffer: order of things, resume bit for bit, bounds and culprits."""

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc.errors import EXIT_CONTINUE, EXIT_DONE, EXIT_USER
from prorl_hpc.buffer.keys import make_keys
from prorl_hpc.buffer.messages import VALIDATION_BASE, BufferGone, Fenced, GroupIds, GroupRef
from prorl_hpc.buffer.shard import ShardDamaged
from prorl_hpc.learner import output, session
from prorl_hpc.learner.algorithm_error import AlgorithmError
from prorl_hpc.learner.checkpoint import checkpoint_steps, read_state
from prorl_hpc.learner.collect import NoBatch
from prorl_hpc.learner.link import StopWanted, explain, open_line, patience
from prorl_hpc.learner.train import TrainError
from prorl_hpc.learner.validate import read_validations
from prorl_hpc.observe.metrics import read_metrics
from prorl_hpc.policy import latest_version, read_manifest
from prorl_hpc.recipe import Recipe, ResetConfig, StageConfig, dump_recipe
from prorl_hpc.records import Group
from prorl_hpc.run import Run
from tests.fakes.learner_client import FakeClient

from .conftest import VOCABULARY, make_run, tiny_recipe

Stop = Callable[[], str | None]


def client(**settings: object) -> FakeClient:
    return FakeClient(vocabulary=VOCABULARY, **settings)  # type: ignore[arg-type]


def go(run: Run, fake: FakeClient, *, stop: Stop = lambda: None) -> str:
    return session.train(
        run, connect=lambda patience_seconds: fake, read=fake.read, stop_reason=stop
    )


def after(num_calls: int) -> Stop:
    """Asks to stop once it was asked so many times."""
    left = iter(range(num_calls))
    return lambda: None if next(left, None) is not None else "the walltime is near"


def weights_hash(run: Run, version: int) -> str:
    return read_manifest(run.policy(version)).files["model.safetensors"]


def told(fake: FakeClient, name: str) -> list[object]:
    return [value for call, value in fake.calls if call == name]


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


def test_what_is_validated_has_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long writing beside training takes: a crash must not validate a version twice."""
    recipe = tiny_recipe(max_staleness=50)
    recipe.learner.deterministic = False
    run = make_run(tmp_path / "run", recipe)
    fake = client()
    real, asked = output.write_checkpoint, threading.Event()

    def slow(*args: Any, **settings: Any) -> Path:
        asked.wait(timeout=0.5)  # a validation that is asked for before ends this wait, and fails
        return real(*args, **settings)

    def validate(version: int, counts: dict[str, int], num_rollouts: int) -> None:
        whole = version in (0, *checkpoint_steps(run))
        if version:
            asked.set()
        assert whole

    monkeypatch.setattr(output, "write_checkpoint", slow)
    fake.validate = validate  # type: ignore[method-assign]
    assert go(run, fake) == "done"
    assert asked.is_set()


def test_no_batch_within_the_bound_says_so(tmp_path: Path) -> None:
    recipe = tiny_recipe()
    recipe.learner.batch_seconds = 0.05
    run = make_run(tmp_path / "run", recipe)
    fake = client()
    fake.take = lambda num_groups, *, timeout_seconds: []  # type: ignore[method-assign]
    with pytest.raises(NoBatch, match=r"0 of 8 groups came within learner.batch_seconds=0.05"):
        go(run, fake)


def test_a_draining_buffer_ends_in_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_recipe())
    fake = client()
    real = fake.take

    def take(num_groups: int, *, timeout_seconds: float) -> list[GroupRef]:
        if fake.version < 3:
            return real(num_groups, timeout_seconds=timeout_seconds)
        fake.phase = "draining"
        return []

    fake.take = take  # type: ignore[method-assign]
    assert go(run, fake) == "the buffer is stopping"
    assert checkpoint_steps(run) == [3]


def gone(*args: object, **settings: object) -> None:
    raise BufferGone("no answer from the buffer")


def test_a_lost_buffer_ends_in_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_recipe())
    fake = client()
    real = fake.take

    def take(num_groups: int, *, timeout_seconds: float) -> list[GroupRef]:
        return real(num_groups, timeout_seconds=timeout_seconds) if fake.version < 3 else gone()  # type: ignore[func-returns-value,return-value]

    fake.take = take  # type: ignore[method-assign]
    with pytest.raises(BufferGone):
        go(run, fake)
    assert checkpoint_steps(run) == [3]


@pytest.mark.parametrize("pending", [False, True])
def test_the_last_step_needs_no_buffer(tmp_path: Path, pending: bool) -> None:
    """Whether or not its validation is still to come; a policy that is missing is published."""
    recipe = replace(tiny_recipe(), steps=2)
    run = make_run(tmp_path / "run", recipe)
    fake = client()
    if pending:
        fake.validation_results = lambda version, timeout_seconds=0.0: (  # type: ignore[method-assign]
            gone() if version == 2 else []
        )
    assert go(run, fake) == "done"
    again = client()
    again.announce = gone  # type: ignore[method-assign]
    if pending:
        state = read_state(run.checkpoint(2))
        assert state.decided_step < 2
    shutil.rmtree(run.policy(2))
    assert go(run, again) == "done"
    assert latest_version(run) == 2
    assert read_manifest(run.policy(2)).step == 2


def test_a_stop_ends_every_wait_for_a_buffer_that_is_not_there(tmp_path: Path) -> None:
    """With the real client and nobody at the other end, far within its patience."""
    run = make_run(tmp_path / "run", tiny_recipe())
    make_keys(run)
    asked = []

    def stopping() -> bool:
        asked.append(True)
        return len(asked) > 2

    line = open_line(run, attempt=1, patience_seconds=3600.0, stopping=stopping)
    try:
        with pytest.raises(StopWanted, match="its job never started"):
            line.announce(0, consumed=GroupIds(), filtered=0, step=0)
    finally:
        line.close()


def test_a_stop_while_the_buffer_is_silent_ends_in_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_recipe())
    fake = client()
    real = fake.take

    def take(num_groups: int, *, timeout_seconds: float) -> list[GroupRef]:
        if fake.version < 3:
            return real(num_groups, timeout_seconds=timeout_seconds)
        fake.phase = "silent"
        raise StopWanted("a stop is wanted")

    fake.take = take  # type: ignore[method-assign]
    stop = lambda: "got SIGTERM" if fake.phase == "silent" else None  # noqa: E731
    assert go(run, fake, stop=stop) == "got SIGTERM"
    assert checkpoint_steps(run) == [3]


def test_patience_is_short_once_there_is_nothing_to_ask() -> None:
    recipe = tiny_recipe()
    assert patience(recipe, is_over=False) == 600.0
    assert patience(recipe, is_over=True) == 30.0
    assert "its job never started" in str(explain(Run(Path("nowhere")), BufferGone("gone")))


def test_a_validation_that_does_not_come_back_has_no_score(tmp_path: Path) -> None:
    recipe = tiny_recipe()
    recipe.steps, recipe.learner.batch_seconds = 1, 0.5
    run = make_run(tmp_path / "run", recipe)
    fake = client()
    fake.validation_results = lambda version, timeout_seconds=0.0: None  # type: ignore[method-assign]
    assert go(run, fake) == "done"
    lines = read_validations(run.validation)
    assert [line.score for line in lines] == [None, None]
    assert "learner.batch_seconds=0.5" in lines[0].note


def test_publishing_every_second_step_resumes_with_a_fresh_version(tmp_path: Path) -> None:
    recipe = tiny_recipe(max_staleness=2)
    recipe.steps = 6
    recipe.learner.deterministic = False
    recipe.learner.publish_every_steps = 2
    run = make_run(tmp_path / "run", recipe)
    fake = client()
    go(run, fake, stop=lambda: "now" if ("filtered", 0) in fake.calls else None)
    assert fake.version == 0
    again = client()
    assert go(run, again) == "done"
    assert told(again, "announce") == [(1, 8, 0, 1)]
    assert told(again, "published") == [2, 4, 5, 6]


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (AlgorithmError("bad"), EXIT_USER),
        (NoBatch("nobody"), EXIT_CONTINUE),
        (BufferGone("gone"), EXIT_CONTINUE),
        (OSError(28, "No space left"), EXIT_CONTINUE),
        (Fenced("older"), 1),
        (TrainError("stuck"), 1),
    ],
)
def test_how_it_ends_as_an_exit_code(
    problem: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> str:
        raise problem

    assert session.guarded(body) == code
    out, err = capsys.readouterr()
    assert str(problem) in out + err
    assert "Traceback" not in out + err


def test_done_and_stopped_as_exit_codes() -> None:
    assert session.guarded(lambda: "done") == EXIT_DONE
    assert session.guarded(lambda: "the walltime is near") == EXIT_CONTINUE


def test_programming_errors_are_not_hidden() -> None:
    def body() -> str:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        session.guarded(body)


def test_reading_publishing_and_saving_beside_training_change_nothing(tmp_path: Path) -> None:
    """Overlapped and stopped twice against the deterministic run; exports at their own steps."""
    recipe = tiny_recipe(max_staleness=0)
    whole = make_run(tmp_path / "whole", recipe)
    assert go(whole, client()) == "done"
    recipe.learner.deterministic = False
    recipe.learner.export_every_steps = 5
    recipe.algorithm.max_staleness = 50
    beside = make_run(tmp_path / "beside", recipe)
    for version in (3, 7):
        part = client()

        def stop(part: FakeClient = part, version: int = version) -> str | None:
            return "the walltime is near" if part.version >= version else None

        assert go(beside, part, stop=stop) == "the walltime is near"
    fake = client()
    assert go(beside, fake) == "done"
    assert weights_hash(beside, 12) == weights_hash(whole, 12)
    assert list(read_state(beside.checkpoint(12)).consumed.ranges) == [(0, 96)]
    assert told(fake, "published")[-1] == 12
    exported = sorted(path.name for path in (beside.root / "export").iterdir())
    assert exported == ["step-00000005", "step-00000010", "step-00000012"]


@pytest.mark.parametrize("what", ["policy", "checkpoint"])
def test_what_cannot_be_written_beside_training_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    recipe = tiny_recipe(max_staleness=50)
    recipe.learner.deterministic = False
    run = make_run(tmp_path / "run", recipe)

    def full(*args: object, **settings: object) -> None:
        raise OSError(28, "No space left on device")

    place = {"policy": "write_version", "checkpoint": "write_checkpoint"}[what]
    monkeypatch.setattr(output, place, full)
    with pytest.raises(OSError, match="No space left"):
        go(run, client())
    assert threading.active_count() == 1 or not [
        t for t in threading.enumerate() if t.name in ("publish", "checkpoint", "next-batch")
    ]


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
