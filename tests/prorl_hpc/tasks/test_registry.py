"""The kinds, and the tasks that the shipped recipes name."""

from importlib import import_module

import pytest
import yaml

pytest.importorskip("reasoning_gym")

from hpc.files import asset_directory
from prorl_hpc.agents.characters import build_character_tokenizer
from prorl_hpc.agents.render import render_prompt
from prorl_hpc.choices import EnvironmentKind
from prorl_hpc.compose import compose
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind
from prorl_hpc.tasks.base import TaskError
from prorl_hpc.tasks.registry import KINDS, make_task, make_tasks

SHIPPED = {
    name: config
    for path in sorted((asset_directory("recipes") / "task").glob("*.yaml"))
    for name, config in yaml.safe_load(path.read_text())["tasks"].items()
    if config["kind"] in ("logic", "math") and "data" not in config
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_can_be_imported(kind):
    module, _, function = KINDS[kind].partition(":")
    assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_tasks_make_problems(name):
    given = {k: v for k, v in SHIPPED[name].items() if k in TaskConfig.__dataclass_fields__}
    task = make_task(name, TaskConfig(**given), 0)
    for kind in Kind:
        assert task.instance(task.size(kind) - 1, kind=kind).messages


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward"])
def test_the_quickstart_tasks_suit_the_tiny_model(name):
    model = yaml.safe_load((asset_directory("recipes") / "model" / "tiny.yaml").read_text())
    tokenizer = build_character_tokenizer(model["vocabulary"])
    task = make_task(name, TaskConfig(**SHIPPED[name]), 0)
    for kind, count in ((Kind.validation, 64), (Kind.train, 200)):
        for index in range(count):
            instance = task.instance(index, kind=kind)
            prompt = render_prompt(tokenizer, instance.messages)
            answer = task.demonstration(instance)
            assert len(prompt) + SHIPPED[name]["max_new_tokens"] < model["context_tokens"]
            assert len(answer) < SHIPPED[name]["max_new_tokens"]  # and the end of turn


@pytest.mark.parametrize("name", ["cli", "tools"])
def test_shipped_domains_without_data_make_problems(name):
    recipe = compose(["recipe=logic", f"task={name}", f"tasks.{name}.validation_size=4"])
    if name == "cli":
        recipe.tasks[name].environment = EnvironmentKind.bubblewrap
    task = make_tasks(recipe)[name]
    for kind in Kind:
        assert task.instance(task.size(kind) - 1, kind=kind).messages


@pytest.mark.parametrize("name", ["cli", "tools"])
def test_shipped_domains_with_data_ask_for_their_file(name):
    recipe = compose(["recipe=logic", f"task={name}_file"])
    with pytest.raises(TaskError, match=rf"{name}\.jsonl.* can't be read"):
        make_task(name, recipe.tasks[name], 0)
