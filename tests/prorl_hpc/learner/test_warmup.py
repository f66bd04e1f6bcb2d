"""The starting policy: deterministic, taught by demonstrations, refused in one line."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from prorl_hpc.agents.characters import build_character_tokenizer
from prorl_hpc.learner.model import ModelError
from prorl_hpc.learner.warmup import demonstrations, prepare_start
from prorl_hpc.policy import verify_policy
from prorl_hpc.recipe import Recipe, TaskConfig, WarmupConfig
from prorl_hpc.records import Instance, Kind, Message
from prorl_hpc.run import Run
from prorl_hpc.tasks import registry

from .conftest import save_model, tiny_recipe

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
    losses = [float(line.split("loss ")[1]) for line in capsys.readouterr().out.splitlines()]
    assert losses[0] > 1.5
    assert losses[-1] < 0.3


def test_a_finished_start_is_kept(recipe: Recipe, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    prepare_start(recipe, run, device=CPU)
    inode = run.model_start.stat().st_ino
    prepare_start(replace(recipe, seed=9), run, device=CPU)
    assert run.model_start.stat().st_ino == inode
    assert [p.name for p in run.root.iterdir()] == ["start"]


def test_examples_end_with_the_stop_token_and_mark_the_answer() -> None:
    tokenizer = build_character_tokenizer("abcdefghij")
    examples = demonstrations(
        {"letters": EchoTask()}, {"letters": 1.0}, tokenizer, seed=0, longest=9
    )
    ids, begin = next(examples)
    # The letter, the separator, the letter again, the end: the answer begins at 2.
    assert (len(ids), begin) == (4, 2)
    assert ids[0] == ids[2]
    assert ids[3] == tokenizer.eos_token_id
    again = demonstrations({"letters": EchoTask()}, {"letters": 1.0}, tokenizer, seed=0, longest=9)
    assert np.array_equal(next(again)[0], ids)


def test_no_demonstration_is_one_line() -> None:
    tokenizer = build_character_tokenizer("abcdefghij")
    for task, longest in ((EchoTask(shows=False), 9), (EchoTask(), 3)):
        with pytest.raises(ModelError, match=r"warmup.steps"):
            next(
                demonstrations(
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
