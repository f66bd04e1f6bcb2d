"""The starting policy: deterministic, taught by demonstrations, refused in one line."""

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prorl_hpc.agents.characters import build_character_tokenizer
from prorl_hpc.learner import space, warmup
from prorl_hpc.learner.demonstrations import Demonstrations
from prorl_hpc.learner.model import ModelError
from prorl_hpc.learner.warmup import prepare_start
from prorl_hpc.observe.dashboard import warmup_line
from prorl_hpc.observe.metrics import read_metrics
from prorl_hpc.policy import verify_policy
from prorl_hpc.recipe import Recipe, TaskConfig, WarmupConfig, dump_recipe
from prorl_hpc.records import Instance, Kind, Message
from prorl_hpc.run import Run
from prorl_hpc.tasks import registry

from .conftest import make_run, save_model, tiny_recipe
from .loop_helpers import after, client, go

CPU = torch.device("cpu")


class EchoTask:
    """The answer repeats the letter of the question."""

    name = "letters"

    def __init__(self, *, shows: bool = True) -> None:
        self.shows = shows

    def size(self, kind: Kind) -> int:
        return 10

    def instance(self, index: int, *, kind: Kind) -> Instance:
        letter = "abcdefghij"[index]
        return Instance(
            task="letters", instance_id=letter, index=index,
            messages=(Message(role="user", content=letter),), answer=letter,
        )  # fmt: skip

    def demonstration(self, instance: Instance) -> str | None:
        return str(instance.answer) if self.shows else None


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recipe]:
    monkeypatch.setattr(registry, "make_tasks", lambda recipe: {"letters": EchoTask()})
    recipe = tiny_recipe()
    recipe.warmup = WarmupConfig(steps=60, batch=10, learning_rate=1e-2, max_tokens=16)
    yield recipe


def test_warm_up_teaches_the_answers_the_same_way_each_time(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hashes = []
    for name in ("a", "b"):
        run = Run(tmp_path / name)
        prepare_start(recipe, run, device=CPU)
        hashes.append(verify_policy(run.model_start).files["model.safetensors"])
    assert hashes[0] == hashes[1]
    out = capsys.readouterr().out.splitlines()
    losses = [float(line.split("loss ")[1]) for line in out]
    assert losses[0] > 1.5
    assert losses[-1] < 0.3


def test_a_finished_start_is_kept(recipe: Recipe, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    prepare_start(recipe, run, device=CPU)
    inode = run.model_start.stat().st_ino
    prepare_start(replace(recipe, seed=9), run, device=CPU)
    assert run.model_start.stat().st_ino == inode
    assert sorted(p.name for p in run.root.iterdir()) == ["metrics", "start"]


def test_the_warm_up_is_told_row_by_row(recipe: Recipe, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    prepare_start(recipe, run, device=CPU)
    rows = read_metrics(run.metrics("learner"))
    assert {row["event"] for row in rows} == {"warmup"}
    assert {1, 21, 41, 60} <= {row["step"] for row in rows}
    assert rows[0]["loss"] > 1.5 > 0.3 > rows[-1]["loss"]
    assert "step 60/60: loss" in str(warmup_line(rows[-1], steps=60))


def stops_after(num_calls: int) -> Callable[[], str | None]:
    left = iter(range(num_calls))
    return lambda: None if next(left, None) is not None else "got SIGTERM"


@pytest.mark.parametrize("damage", [None, "other recipe", "bytes"])
def test_a_warm_up_stopped_in_the_middle_goes_on_there_bit_for_bit(
    recipe: Recipe, tmp_path: Path, damage: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or begins anew, to the same end, where what was kept is of no use."""
    whole, parts = Run(tmp_path / "whole"), Run(tmp_path / "parts")
    prepare_start(recipe, whole, device=CPU)
    assert prepare_start(recipe, parts, device=CPU, stop_reason=stops_after(0)) == "got SIGTERM"
    for calls in (10, 25):
        assert prepare_start(recipe, parts, device=CPU, stop_reason=stops_after(calls))
        assert not parts.model_start.exists()
    if damage == "other recipe":
        prepare_start(replace(recipe, seed=5), parts, device=CPU, stop_reason=stops_after(3))
    elif damage == "bytes":
        parts.warmup.write_bytes(b"rubbish")
    capsys.readouterr()
    assert prepare_start(recipe, parts, device=CPU, stop_reason=stops_after(1000)) is None
    said = "begins anew" if damage else "goes on after 35 of 60 steps"
    assert said in capsys.readouterr().out
    hashes = [verify_policy(run.model_start).files for run in (whole, parts)]
    assert hashes[0] == hashes[1]
    assert sorted(p.name for p in parts.root.iterdir()) == ["metrics", "start"]


def test_a_stop_in_the_warm_up_ends_the_attempt_to_be_continued(
    recipe: Recipe, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", recipe)
    assert go(run, client(), stop=after(7)) == "the walltime is near"
    assert run.warmup.exists()
    recipe.steps = 1
    run.recipe.write_text(dump_recipe(recipe))
    assert go(run, client()) == "done"
    rows = read_metrics(run.metrics("learner"))
    assert [row["event"] for row in rows].count("step") == 1


def test_examples_end_with_the_stop_token_and_mark_the_answer() -> None:
    tokenizer = build_character_tokenizer("abcdefghij")
    examples = Demonstrations(
        {"letters": EchoTask()}, {"letters": 1.0}, tokenizer, seed=0, longest=9
    )
    ids, begin = next(examples)
    # The letter, the separator, the letter again, the end: the answer begins at 2.
    assert (len(ids), begin) == (4, 2)
    assert ids[0] == ids[2]
    assert ids[3] == tokenizer.eos_token_id
    again = Demonstrations({"letters": EchoTask()}, {"letters": 1.0}, tokenizer, seed=0, longest=9)
    assert np.array_equal(next(again)[0], ids)


def test_no_demonstration_is_one_line() -> None:
    tokenizer = build_character_tokenizer("abcdefghij")
    for task, longest in ((EchoTask(shows=False), 9), (EchoTask(), 3)):
        with pytest.raises(ModelError, match=r"warmup.steps"):
            next(
                Demonstrations(
                    {"letters": task}, {"letters": 1.0}, tokenizer, seed=0, longest=longest
                )
            )


def test_a_given_model_is_taken_with_its_companions(tmp_path: Path) -> None:
    recipe = tiny_recipe()
    source = save_model(tmp_path / "source")
    build_character_tokenizer("abcdefghij").save_pretrained(source)
    recipe.model.path = str(source)
    run = Run(tmp_path / "run")
    prepare_start(recipe, run, device=CPU)
    assert "tokenizer.json" in verify_policy(run.model_start).files


@pytest.mark.parametrize("given", [True, False])
def test_a_full_disk_is_waited_for_and_is_no_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe()
    if given:
        source = save_model(tmp_path / "source")
        build_character_tokenizer("abcdefghij").save_pretrained(source)
        recipe.model.path = str(source)
    name = "copy_companions" if given else "save_weights"
    real, calls = getattr(warmup, name), []

    def save(*values: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*values)

    monkeypatch.setattr(warmup, name, save)
    monkeypatch.setattr(space, "RETRY_SECONDS", 0.0)
    run = Run(tmp_path / "run")
    assert prepare_start(recipe, run, device=CPU) is None
    verify_policy(run.model_start)
    assert "the disk is full; the model to start from waits" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "/nowhere/at/all"}, r"model.path='/nowhere/at/all' can't be loaded"),
        ({"vocabulary": None}, r"model.path and model.vocabulary are both empty"),
        ({"config": {"model_type": "no-such-type"}}, r"model.config=.* can't be built"),
    ],
)
def test_bad_models_are_one_line(tmp_path: Path, change: dict[str, object], message: str) -> None:
    recipe = tiny_recipe()
    recipe.tasks = {"letters": TaskConfig(kind="logic")}
    for name, value in change.items():
        setattr(recipe.model, name, value)
    with pytest.raises(ModelError, match=message):
        prepare_start(recipe, Run(tmp_path / "run"), device=CPU)
    assert list((tmp_path / "run").iterdir()) == []
