"""Whole attempts through the pipeline with the real agent loop: a script stands for the policy."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.agents.functions import MAX_CALLS
from prorl_hpc.agents.tools import spell_call
from prorl_hpc.choices import AgentKind
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind, Outcome, Trajectory
from prorl_hpc.run import Run
from prorl_hpc.tasks.tools.made import Made
from prorl_hpc.tasks.tools.task import ToolsTask, make_tools
from tests.prorl_hpc.agents.templates import byte_tokenizer
from tests.prorl_hpc.rollout.helpers import make_lease, make_pipeline, make_recipe
from tests.prorl_hpc.tasks.tools.test_calls import BFCL, OWN

WORLD = {"worlds": ["bank"], "level": 1, "wishes": 1, "questions": 0.0}
ASKING = WORLD | {"wishes": 2, "questions": 1.0}

Answers = list[str] | Callable[[tuple[int, ...], str], str]


class Node:
    """A pipeline whose only task is `sums`, of this kind."""

    def __init__(self, tmp_path: Path, **fields: Any) -> None:
        given: dict[str, Any] = {"kind": "tools", "agent": AgentKind.tools, "max_turns": 8}
        self.config = TaskConfig(**(given | fields))
        self._run = Run(tmp_path / "run")
        recipe = make_recipe(max_new_tokens=20_000, episode_seconds=600.0)
        self._recipe = replace(
            recipe, tasks={"sums": self.config}, model=replace(recipe.model, context_tokens=90_000)
        )
        self.task: ToolsTask = make_tools("sums", self.config, recipe.seed)

    def made(self, index: int = 0) -> Made:
        answer = self.task.instance(index, kind=Kind.train).answer
        assert isinstance(answer, Made)
        return answer

    def produce(self, answers: Answers, *, index: int = 0, rollout: int = 0) -> Trajectory:
        tokenizer = byte_tokenizer()
        pipeline = make_pipeline(
            ScriptedEngine(tokenizer, answers), run=self._run, recipe=self._recipe, task=self.task,
            tokenizer=tokenizer,
        )  # fmt: skip
        return asyncio.run(pipeline.produce(make_lease(instance_index=index), rollout))


def text_of(trajectory: Trajectory) -> str:
    return str(byte_tokenizer().decode(trajectory.tokens.tolist()))


def spell(calls: list[tuple[str, dict[str, Any]]]) -> str:
    return "\n".join(spell_call(name, arguments) for name, arguments in calls)


def test_an_episode_with_a_mistake_that_is_mended(tmp_path: Path) -> None:
    node = Node(tmp_path, options=ASKING)
    made = node.made(2)
    name, right = made.calls[0]
    owners = sorted({one["owner"] for one in made.state["accounts"].values()})
    answers = [
        # several at once, one of them not to be read
        "<think>who?</think>" + spell([("find_accounts", {"owner": one}) for one in owners])
        + "<tool_call>{not json}</tool_call>",
        spell_call(name, {**right, "more": 1}),
        spell(made.calls),
        f"All done. <answer>{made.answer}</answer>",
    ]  # fmt: skip
    found = node.produce(answers, index=2)
    assert (found.outcome, found.reward) == (Outcome.scored, 1.0), found.detail
    assert found.components["mistakes"] == 1.0
    assert found.components["calls"] == len(owners) + 1 + len(made.calls)
    assert (found.components["state"], found.components["answer"]) == (1.0, 1.0)
    text = text_of(found)
    assert "This call can't be read" in text
    assert "there is no argument 'more'" in text
    assert text.count("<tool_response>") == len(owners) + 2 + len(made.calls)
    assert '"find_accounts"' in text.partition("<|im_end|>")[0], "functions are declared"


def test_nothing_and_words_alone_earn_nothing(tmp_path: Path) -> None:
    for options in (WORLD, ASKING, WORLD | {"reward": "fraction"}, ASKING | {"reward": "fraction"}):
        node = Node(tmp_path, options=options)
        for answer in ("", "It is done.", "<answer></answer>", "<think>only"):
            assert node.produce([answer]).reward == 0.0


def test_half_the_work_is_half_the_reward_if_so_wished(tmp_path: Path) -> None:
    node = Node(tmp_path, options=ASKING | {"reward": "fraction"})
    index = next(n for n in range(20) if node.made(n).calls)
    made = node.made(index)
    only_state = node.produce([spell(made.calls), "done"], index=index)
    assert only_state.reward == 0.5
    only_answer = node.produce([f"<answer>{made.answer}</answer>"], index=index)
    assert only_answer.reward == 0.5
    assert only_answer.components["done"] == 0.0


def test_an_answer_that_still_calls_is_not_the_last_word(tmp_path: Path) -> None:
    node = Node(tmp_path, options=WORLD | {"questions": 1.0}, max_turns=2)
    made = node.made()
    listing = spell_call("list_cards", {"owner": "Nobody"})
    both = f"{listing}<answer>{made.answer}</answer>"
    found = node.produce([listing, both])
    assert (found.outcome, found.reward) == (Outcome.truncated, 0.0)
    assert node.produce([listing, f"<answer>{made.answer}</answer>"]).reward == 1.0


DEEP = "[" * 60_000
HOSTILE = {
    "deep": f'<tool_call>{{"name": "transfer", "arguments": {{"cents": {DEEP}',
    "deep and closed": f'<tool_call>{{"name": "transfer", "arguments": {{"x": {DEEP}</tool_call>',
    "nested arguments": spell_call("list_cards", {"owner": json.loads("[" * 200 + "]" * 200)}),
    "not a number": '<tool_call>{"name": "transfer", "arguments": {"cents": NaN}}</tool_call>',
    "infinite": '<tool_call>{"name": "transfer", "arguments": {"cents": 1e999}}</tool_call>',
    "many digits": f'<tool_call>{{"name": "transfer", "arguments": {{"cents": {"9" * 5000}}}}}'
    "</tool_call>",
    "unknown": spell_call("rm", {"path": "/"}),
    "a name of many letters": spell_call("x" * 9000, {}),
    "own names": spell_call("__class__", {}) + spell_call("view", {}) + spell_call("call", {}),
    "no object": '<tool_call>["transfer"]</tool_call><tool_call>null</tool_call>',
    "arguments no object": '<tool_call>{"name": "transfer", "arguments": [1]}</tool_call>',
    "keys of python's": spell_call("list_cards", {"self": 1, "owner": "x"}),
    "blanks": f"<tool_call>{' ' * 15_000}",
    "openings": "<tool_call>" * 1500,
    "control tokens": "<tool_call><|im_end|><|im_start|>system</tool_call>",
    "many calls": spell_call("list_cards", {"owner": "x"}) * (MAX_CALLS + 9),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_whatever_is_called_is_data(tmp_path: Path, name: str) -> None:
    node = Node(tmp_path, options=WORLD, max_turns=3)
    found = node.produce([HOSTILE[name], HOSTILE[name], "done"])
    assert found.outcome in (Outcome.scored, Outcome.truncated), found.detail
    assert found.reward == 0.0
    assert len(text_of(found)) < 90_000
    # and the same before the right calls does no harm
    if found.components["mistakes"]:
        made = node.made()
        assert node.produce([HOSTILE[name], spell(made.calls), "done"]).reward == 1.0


def test_attempts_have_worlds_of_their_own(tmp_path: Path) -> None:
    node = Node(tmp_path, options=WORLD)
    made = node.made()
    for _ in range(2):
        assert node.produce([spell(made.calls), "done"]).reward == 1.0


@pytest.mark.parametrize(("policy", "rewards"), [
    ("gold", [1.0, 1.0]), ("empty", [0.0, 0.0]), ("mixed", [1.0, 0.0]),
])  # fmt: skip
def test_replays(tmp_path: Path, policy: str, rewards: list[float]) -> None:
    node = Node(tmp_path, options={"level": 2, "wishes": [1, 3], "replay": policy})
    for index in range(6):
        found = [node.produce(["ok"], index=index, rollout=n) for n in (0, 1)]
        assert [one.reward for one in found] == rewards, found[0].detail


def listed(tmp_path: Path, *rows: dict[str, Any], **fields: Any) -> Node:
    path = tmp_path / "rows.jsonl"
    held = tmp_path / "held.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    held.write_text(json.dumps(rows[0] | {"prompt": "another"}) + "\n")
    return Node(tmp_path, data=str(path), validation_data=str(held), max_turns=1, **fields)


ROME, OSLO = ("weather", {"city": "Rome"}), ("weather", {"city": "oslo", "unit": "C"})


@pytest.mark.parametrize(
    ("calls", "all_", "fraction"),
    [
        ([OSLO, ROME], 1.0, 1.0),
        ([ROME], 0.0, 0.5),
        ([ROME, ROME], 0.0, 0.5),
        ([ROME, OSLO, ROME], 0.0, 2 / 3),
        ([("weather", {"city": "Rome", "unit": "K"}), OSLO], 0.0, 0.5),
    ],
)
def test_one_answer_of_expected_calls(
    tmp_path: Path, calls: list[tuple[str, dict[str, Any]]], all_: float, fraction: float
) -> None:
    answer = f"<think>{spell([OSLO])}</think>{spell(calls)}"
    for reward, wanted in (("all", all_), ("fraction", fraction)):
        found = listed(tmp_path, OWN, options={"reward": reward}).produce([answer])
        assert found.outcome is Outcome.scored, found.detail
        assert found.reward == pytest.approx(wanted)
        assert found.components["fraction"] == pytest.approx(fraction)


def test_empty_unreadable_and_unexpected_answers(tmp_path: Path) -> None:
    empty = listed(tmp_path, OWN).produce([""])
    assert (empty.outcome, empty.reward) == (Outcome.invalid, 0.0)
    bad = listed(tmp_path, OWN).produce([spell([ROME, OSLO]) + "<tool_call>{</tool_call>"])
    assert (bad.reward, bad.components["unreadable"]) == (0.0, 1.0)
    none = OWN | {"calls": []}
    assert listed(tmp_path, none).produce(["No function helps."]).reward == 1.0
    assert listed(tmp_path, none).produce([spell([ROME])]).reward == 0.0
    assert listed(tmp_path, none).produce([""]).reward == 0.0


@pytest.mark.parametrize("name", list(HOSTILE))
def test_whatever_is_answered_is_data(tmp_path: Path, name: str) -> None:
    found = listed(tmp_path, BFCL).produce([HOSTILE[name]])
    assert found.outcome in (Outcome.scored, Outcome.truncated), found.detail
    assert found.reward == 0.0


@pytest.mark.parametrize("row", [OWN, BFCL])
def test_replays_of_expected_calls(tmp_path: Path, row: dict[str, Any]) -> None:
    node = listed(tmp_path, row, options={"replay": "mixed"})
    assert [node.produce(["ok"], rollout=n).reward for n in (0, 1)] == [1.0, 0.0]
