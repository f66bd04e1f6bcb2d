"""How many instances there are: what the data holds, whatever the recipe asks for."""

import json
from pathlib import Path

import pytest

from prorl_hpc.buffer.__main__ import size_of
from prorl_hpc.buffer.dispatcher import Dispatcher
from prorl_hpc.buffer.settings import TaskSize, config_from_recipe
from prorl_hpc.compose import compose
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind
from prorl_hpc.tasks.base import TaskError
from prorl_hpc.tasks.registry import make_task

from .buffer_helpers import make_config


def problems(path: Path, count: int, *, first: int = 0) -> Path:
    rows = [{"problem": f"{n} + {n}?", "answer": 2 * n} for n in range(first, first + count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_sizes_are_those_of_the_data(tmp_path: Path) -> None:
    data = problems(tmp_path / "train.jsonl", 5)
    held = problems(tmp_path / "held.jsonl", 3, first=100)
    tasks = ["kind=math", f"data={data}", "train_size=1000", f"validation_data={held}"]
    recipe = compose(["recipe=quickstart", *(f"tasks.mine.{one}" for one in tasks)])
    config = config_from_recipe(recipe, size_of=lambda name: size_of(recipe, name))
    assert config.tasks["mine"].train_size == 5
    assert config.validation_sizes["mine"] == 3
    assert config.tasks["spell_backward"].train_size > 5


def test_a_validation_asks_for_no_instance_that_is_not_there() -> None:
    config = make_config(validation_sizes={"sums": 3, "more": 8})
    d = Dispatcher(config)
    d.validate(version=0, counts={"sums": 64, "more": 2}, num_rollouts=1)
    assert d.validation_results(0).num_open == 5


def test_a_task_of_weight_0_is_all_validation(tmp_path: Path) -> None:
    data = problems(tmp_path / "test.jsonl", 5)
    config = TaskConfig(kind="math", data=str(data), weight=0.0)
    task = make_task("t", config, 0)
    assert (task.size(Kind.train), task.size(Kind.validation)) == (0, 5)
    fewer = TaskConfig(kind="math", data=str(data), weight=0.0, validation_size=2)
    assert make_task("t", fewer, 0).size(Kind.validation) == 2
    with pytest.raises(TaskError, match="leaves nothing to train"):
        make_task("t", TaskConfig(kind="math", data=str(data)), 0)


def test_the_size_of_a_task_that_is_not_trained_may_be_0() -> None:
    recipe = compose(["recipe=quickstart", "tasks.mine.kind=math", "tasks.mine.weight=0"])
    config = config_from_recipe(recipe, size_of=lambda name: TaskSize(train=1, validation=2))
    assert "mine" not in config.tasks
    assert config.validation_sizes["mine"] == 2
