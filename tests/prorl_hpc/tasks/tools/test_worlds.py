"""Hundreds of problems in simulated worlds, and calls of every kind upon them."""

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_hpc.choices import AgentKind
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind
from prorl_hpc.tasks.tools.made import Made, make_problem
from prorl_hpc.tasks.tools.sessions import agreement, graded, is_answer
from prorl_hpc.tasks.tools.task import make_tools
from prorl_hpc.tasks.tools.worlds import SETTINGS
from prorl_hpc.tasks.tools.worlds.base import World

WORLDS = tuple(SETTINGS)


def make(number: int, *, world: str | None = None, questions: float = 0.4) -> Made | None:
    return make_problem(
        random.Random(number), world=world or WORLDS[number % len(WORLDS)], level=1 + number % 5,
        num_wishes=1 + number % 3, questions=questions,
    )  # fmt: skip


def world_of(made: Made) -> World:
    return SETTINGS[made.world].world(made.state)


@pytest.mark.parametrize("world", WORLDS)
def test_the_known_calls_do_it_and_nothing_does_not(world: str) -> None:
    texts, functions = set(), Counter[str]()
    made_some = [make(number, world=world) for number in range(100)]
    for made in filter(None, made_some):
        there = world_of(made)
        before = there.view()
        assert agreement(before, made.expected, before) == float(before == made.expected)
        assert made.answer or before != made.expected, "doing nothing would be right"
        for name, arguments in made.calls:
            assert "error" not in (there.call(name, arguments)), (made.text, name, arguments)
            functions[name] += 1
        assert there.view() == made.expected
        assert agreement(before, made.expected, there.view()) == 1.0
        texts.add(made.text)
    assert len(texts) > 90
    writing = {name for name in SETTINGS[world].world.schemas if not name.startswith(
        ("find", "list", "get"))}  # fmt: skip
    assert set(functions) == writing, "every function that changes something is needed by some wish"


def test_the_same_seed_gives_the_same_problem_and_sides_share_none() -> None:
    config = TaskConfig(
        kind="tools",
        agent=AgentKind.tools,
        max_turns=8,
        options={"level": [1, 3], "wishes": [1, 2]},
    )
    one, two = make_tools("t", config, 0), make_tools("t", config, 0)
    seen = {kind: [one.instance(n, kind=kind) for n in range(40)] for kind in Kind}
    assert seen[Kind.train][9] == two.instance(9, kind=Kind.train)
    assert make_tools("t", config, 1).instance(9, kind=Kind.train) != seen[Kind.train][9]
    keys = {kind: {(i.messages, json.dumps(i.answer.state)) for i in seen[kind]} for kind in Kind}
    assert not keys[Kind.train] & keys[Kind.validation]
    assert {i.answer.world for i in seen[Kind.train]} == set(WORLDS)
    assert any(i.answer.answer for i in seen[Kind.train])


def test_a_state_belongs_to_its_world_alone() -> None:
    made = make(0, world="bank", questions=0.0)
    assert made is not None
    one, two = world_of(made), world_of(made)
    for name, arguments in made.calls:
        one.call(name, arguments)
    assert one.view() != two.view() == world_of(made).view()


def bank() -> World:
    account = {"owner": "Ada Kim", "kind": "checking", "balance": 100}
    return SETTINGS["bank"].world(
        {"made": 0, "transfers": [], "cards": {"C-1": {"owner": "Ada Kim", "limit": 5,
                                                       "blocked": True}},
         "accounts": {"A-1": account, "A-2": account | {"kind": "savings"}}}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("pay", {}, "no function 'pay'; there are find_accounts"),
        ("__init__", {"state": {}}, "no function '__init__'"),
        ("view", {}, "no function 'view'"),
        ("transfer", {"source": "A-1", "target": "A-2"}, "'cents' is missing"),
        ("transfer", {"source": "A-1", "target": "A-9", "cents": 1}, "no account 'A-9'"),
        ("transfer", {"source": "A-1", "target": "A-1", "cents": 1}, "the same account"),
        ("transfer", {"source": "A-1", "target": "A-2", "cents": 101}, "100 cents only"),
        ("transfer", {"source": "A-1", "target": "A-2", "cents": -1}, "must be in [1, None]"),
        ("transfer", {"source": "A-1", "target": "A-2", "cents": "1"}, "must be integer"),
        ("block_card", {"card": "C-1"}, "blocked already"),
        ("find_accounts", {"owner": "Ada"}, "give the full name"),
    ],
)
def test_mistakes_are_told_and_change_nothing(
    name: str, arguments: dict[str, Any], words: str
) -> None:
    world = bank()
    before = world.view()
    assert words in json.loads(world.call(name, arguments))["error"]
    assert world.view() == before
    assert "error" not in world.call("transfer", {"source": "A-1", "target": "A-2", "cents": 1.0})
    assert world.view()["account/A-1/balance"] == "99"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["A-1", "09:30", "2025-01-02", "2025-02-31", "open", "urgent", "nobody"]),
    lambda inside: st.lists(inside, max_size=3)
    | st.dictionaries(st.sampled_from(["product", "quantity", "x"]), inside),
    max_leaves=6,
)  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
def test_any_call_has_a_result_that_is_json(name: str) -> None:
    setting = SETTINGS[name]
    state = setting.fill(random.Random(3), 1)
    numbers = [number for part in state.values() if isinstance(part, dict) for number in part]
    values = VALUES | st.sampled_from(numbers)

    @given(st.data())
    def check(data: Any) -> None:
        world = setting.world(state)
        for _ in range(3):
            function = data.draw(st.sampled_from(list(world.schemas)))
            schema = world.schemas[function]["function"]["parameters"]
            keys = dict.fromkeys(schema["properties"], values)
            needed = {key: keys[key] for key in schema["required"]}
            rest = {key: value for key, value in keys.items() if key not in needed}
            arguments = data.draw(st.fixed_dictionaries(needed, optional=rest))
            result = world.call(function, arguments)
            json.loads(result)
        assert all(isinstance(value, str) for value in world.view().values())

    check()


# before {a: 1, b: 1}; expected {a: 2, b: 1, c: 1}: two changes
@pytest.mark.parametrize(
    ("found", "share"),
    [
        ({"a": "2", "b": "1", "c": "1"}, 1.0),
        ({"a": "1", "b": "1"}, 0.0),
        ({"a": "2", "b": "1"}, 1 / 2),
        ({"a": "2", "c": "1"}, 2 / 3),  # both, and one too many
        ({"a": "3", "b": "1"}, 0.0),
        ({}, 0.0),
    ],
)
def test_agreement(found: dict[str, str], share: float) -> None:
    before, expected = {"a": "1", "b": "1"}, {"a": "2", "b": "1", "c": "1"}
    assert agreement(before, expected, found) == pytest.approx(share)


@pytest.mark.parametrize(
    ("share", "right", "asked", "changed", "all_", "fraction"),
    [
        (1.0, True, False, True, 1.0, 1.0),
        (0.5, True, False, True, 0.0, 0.5),
        (1.0, False, True, True, 0.0, 0.5),
        (1.0, True, True, True, 1.0, 1.0),
        (1.0, True, True, False, 1.0, 1.0),
        (1.0, False, True, False, 0.0, 0.0),
        (0.0, True, True, False, 0.0, 0.0),  # nothing was to be changed, and something was
    ],
)
def test_grades(
    share: float, right: bool, asked: bool, changed: bool, all_: float, fraction: float
) -> None:
    for all_or_nothing, wanted in ((True, all_), (False, fraction)):
        score = graded(
            share, right=right, asked=asked, changed=changed, all_or_nothing=all_or_nothing,
            counts={},
        )  # fmt: skip
        assert score.reward == wanted
        assert score.components["fraction"] == fraction


@pytest.mark.parametrize(
    ("text", "wanted", "right"),
    [
        ("It is <answer>1,250</answer>.", "1250", True),
        ("<answer>1250.0</answer>", "1250", False),
        ("1250", "1250", True),
        ("It is 1250", "1250", False),
        ("<answer>ben  zhang.</answer>", "Ben Zhang", True),
        ("<answer>Ben</answer>", "Ben Zhang", False),
        ("<answer></answer>", "0", False),
        ("", "0", False),
    ],
)
def test_answers(text: str, wanted: str, right: bool) -> None:
    assert is_answer(text, wanted) is right
