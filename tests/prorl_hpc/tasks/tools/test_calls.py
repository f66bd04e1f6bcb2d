"""Arguments against schemas, calls against expected calls, lines of data sets."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_hpc.agents.functions import said
from prorl_hpc.agents.tools import Call, calls_in
from prorl_hpc.choices import AgentKind, EnvironmentKind
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind
from prorl_hpc.tasks.base import TaskError
from prorl_hpc.tasks.tools.match import Expected, is_right, num_right
from prorl_hpc.tasks.tools.rows import decode_row, spelled
from prorl_hpc.tasks.tools.schemas import complaint
from prorl_hpc.tasks.tools.task import make_tools, read_answer

SCHEMA = {
    "type": "object", "required": ["city"],
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"type": "string", "enum": ["C", "F"]}, "share": {"type": "number"},
        "lines": {"type": "array", "minItems": 1, "items": {
            "type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"city": "Rome"}, None),
        ({"city": "Rome", "days": 2.0, "unit": "C", "lines": [{"n": 1}], "share": 1}, None),
        ({}, "argument 'city' is missing"),
        ({"city": 3}, "argument 'city' must be string, not 3"),
        ({"city": None}, "must be string, not None"),
        ({"city": "R", "days": "2"}, "argument 'days' must be integer, not '2'"),
        ({"city": "R", "days": True}, "must be integer, not True"),
        ({"city": "R", "days": 2.5}, "must be integer, not 2.5"),
        ({"city": "R", "days": 10}, "argument 'days' is 10; it must be in [1, 9]"),
        ({"city": "R", "unit": "K"}, "argument 'unit' is 'K'; choose of C, F"),
        ({"city": "R", "land": "I"}, "there is no argument 'land'; known are city, days"),
        ({"city": "R", "lines": []}, "needs 1 items at least"),
        ({"city": "R", "lines": [{"n": 1}, {"n": "x"}]}, "argument 'lines[1].n' must be integer"),
        ({"city": "R", "lines": [{}]}, "argument lines[0].'n' is missing"),
    ],
)
def test_complaints(arguments: dict[str, Any], words: str | None) -> None:
    found = complaint(arguments, SCHEMA)
    assert found is None if words is None else found is not None and words in found


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=99),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=9), inside),
    max_leaves=9,
)


@given(st.dictionaries(st.sampled_from(["city", "days", "unit", "share", "lines", "x"]), VALUES))
def test_any_arguments_have_a_short_complaint_or_none(arguments: dict[str, Any]) -> None:
    found = complaint(arguments, SCHEMA)
    assert found is None or 0 < len(found) < 400


def expected(name: str = "f", **allowed: list[Any]) -> Expected:
    return Expected(name=name, allowed=allowed)


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"a": 1, "b": "New York"}, True),
        ({"a": 1.0, "b": "new-york."}, True),
        ({"a": True, "b": "New York"}, False),
        ({"a": 2, "b": "NYC"}, True),
        ({"a": 3, "b": "NYC"}, False),
        ({"a": 1}, False),
        ({"a": 1, "b": "NYC", "c": 0}, False),
        ({"a": "1", "b": "NYC"}, False),
    ],
)
def test_one_call(arguments: dict[str, Any], right: bool) -> None:
    wanted = expected(a=[1, 2], b=["New York", "NYC"])
    assert is_right(Call(name="f", arguments=arguments), wanted, loose=True) is right
    assert not is_right(Call(name="g", arguments=arguments), wanted, loose=True)


def test_texts_can_be_compared_exactly() -> None:
    wanted = expected(a=["New York"])
    call = Call(name="f", arguments={"a": "new york"})
    assert is_right(call, wanted, loose=True)
    assert not is_right(call, wanted, loose=False)


def test_each_call_stands_for_one_expected_call() -> None:
    # the first call suits both, the second only the first: an exchange is needed
    wanted = [expected(a=[1, 2]), expected(a=[1])]
    calls = [Call(name="f", arguments={"a": n}) for n in (1, 2)]
    assert num_right(calls, wanted, ordered=False, loose=True) == 2
    assert num_right(calls, wanted, ordered=True, loose=True) == 1
    assert num_right(calls[:1] * 2, wanted, ordered=False, loose=True) == 2
    assert num_right(calls[1:] * 2, wanted, ordered=False, loose=True) == 1
    assert num_right(calls * 50, wanted, ordered=False, loose=True) == 0


@given(st.lists(st.integers(0, 3), max_size=5), st.lists(st.integers(0, 3), max_size=5))
def test_without_alternatives_right_calls_are_a_common_multiset(
    found: list[int], wanted: list[int]
) -> None:
    calls = [Call(name="f", arguments={"a": n}) for n in found]
    count = sum(min(found.count(n), wanted.count(n)) for n in range(4))
    goals = [expected(a=[n]) for n in wanted]
    assert num_right(calls, goals, ordered=False, loose=True) == count


WEATHER = {
    "name": "weather", "description": "Tells it.",
    "parameters": {"type": "dict", "required": ["city"], "properties": {
        "city": {"type": "string"}, "unit": {"type": "string"}, "days": {"type": "float"},
        "place": {"type": "dict", "properties": {"lat": {"type": "float"}}}}},
}  # fmt: skip
BFCL = {
    "id": "simple_0", "question": [[{"role": "user", "content": "Weather in Rome?"}]],
    "function": [WEATHER],
    "ground_truth": [{"weather": {"city": ["Rome", "Roma"], "unit": ["", "C"],
                                  "place": [{"lat": [41.9, 42], "lon": [12.5, ""]}, ""]}}],
}  # fmt: skip
OWN = {
    "prompt": "Rome and Oslo?", "tools": [WEATHER],
    "calls": [{"name": "weather", "arguments": {"city": "Rome"}},
              {"name": "weather", "arguments": {"city": "Oslo"}, "allowed": {"unit": ["C"]},
               "optional": ["unit"]}],
}  # fmt: skip


def test_published_lines() -> None:
    problem = decode_row(BFCL, system_prompt="Call.")
    assert [m.role for m in problem.messages] == ["system", "user"]
    assert problem.identity == "simple_0"
    parameters = problem.answer.tools[0]["function"]["parameters"]
    assert parameters["type"] == "object"
    assert parameters["properties"]["place"]["properties"]["lat"]["type"] == "number"
    (wanted,) = problem.answer.calls
    for arguments, right in (
        ({"city": "roma"}, True),
        ({"city": "Rome", "unit": "c", "place": {"lat": 42}}, True),
        ({"city": "Rome", "place": {"lat": 42, "lon": 1}}, False),
        ({"city": "Rome", "place": {"lon": 12.5}}, False),
        ({"city": "Rome", "unit": ""}, False),
    ):
        assert is_right(Call(name="weather", arguments=arguments), wanted, loose=True) is right


@pytest.mark.parametrize("row", [BFCL, OWN, OWN | {"calls": []}])
def test_the_known_calls_are_right_as_they_are_spelled(row: dict[str, Any]) -> None:
    answer = decode_row(row, system_prompt=None).answer
    calls = calls_in(spelled(answer.calls))
    readable = [call for call in calls if isinstance(call, Call)]
    assert len(readable) == len(calls)
    assert num_right(readable, answer.calls, ordered=True, loose=False) == len(answer.calls)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tools": []}, "must be some"),
        ({"tools": [WEATHER, WEATHER]}, "distinct names"),
        ({"tools": [WEATHER | {"parameters": {"type": "thing"}}]}, "type 'thing' is unknown"),
        ({"tools": ["weather"]}, "isn't an object"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": [{"role": "assistant", "content": "hi"}]}, "end with a message of the user"),
        ({"prompt": [[{"role": "user", "content": "a"}], []]}, "several turns"),
        ({"calls": [{"name": "wether", "arguments": {}}]}, "'wether' is none of the tools"),
        ({"calls": [{"name": "weather", "optional": ["unit"]}]}, "has no value"),
        ({"calls": [3]}, "another form"),
        (
            {"tools": [WEATHER | {"parameters": {"type": "object", "properties": 3}}]},
            "another form",
        ),
        ({"calls": [{"name": "weather", "allowed": {"unit": "C"}}]}, "give a list"),
        (
            {"calls": [{"name": "weather", "arguments": {"a": 1}, "allowed": {"a": [1]}}]},
            "drop one",
        ),
    ],
)
def test_lines_that_are_wrong(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode_row(OWN | changes, system_prompt=None)


def test_a_file_is_split_and_its_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(f"{json.dumps(OWN | {'prompt': f'{n}?'})}\n" for n in range(6)))
    config = TaskConfig(kind="tools", agent=AgentKind.tools, data=str(path), validation_size=2)
    task = make_tools("t", config, 0)
    assert (task.size(Kind.train), task.size(Kind.validation)) == (4, 2)
    instance = task.instance(1, kind=Kind.train)
    task.check_instance(instance)
    path.write_text("{}\n")
    with pytest.raises(TaskError, match="line 1 has no field 'function'"):
        make_tools("t", config, 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"agent": AgentKind.bash}, "set agent=tools"),
        ({"environment": EnvironmentKind.apptainer}, "environment=none"),
        ({"max_turns": 1}, "leaves no turn"),
        ({"options": {"worlds": ["banc"]}}, "did you mean 'bank'"),
        ({"options": {"level": 0}}, "level=0"),
        ({"options": {"wishes": [1, 9]}}, "from 1 to 5"),
        ({"options": {"questions": 2}}, "a share from 0 to 1"),
        ({"options": {"reward": "some"}}, "choose fraction or all"),
        ({"options": {"strings": "some"}}, "choose loose or exact"),
        ({"options": {"replay": "destructive"}}, "choose gold, empty or mixed"),
        ({"options": {"level": 2}, "data": "x.jsonl"}, "for problems that are made"),
    ],
)
def test_recipes_that_are_wrong(fields: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"kind": "tools", "agent": AgentKind.tools, "max_turns": 8}
    with pytest.raises(TaskError, match=words):
        make_tools("t", TaskConfig(**(given | fields)), 0)


def test_what_is_thought_is_not_said() -> None:
    assert said("<think>a</think>b") == "b"
    assert said("a</think>b") == "b"
    assert said("<think>a") == ""
    assert said("a") == "a"


def test_a_posted_instance_is_a_line_without_its_prompt() -> None:
    listed = read_answer({"tools": OWN["tools"], "calls": OWN["calls"]})
    assert listed == decode_row(OWN, system_prompt=None).answer
    for wrong in (None, {}, {"world": "bank"}, {"tools": 3, "calls": []}, {"tools": [WEATHER],
                  "calls": 3}, {"tools": [WEATHER], "calls": [3]}):  # fmt: skip
        with pytest.raises(ValueError, match=r"answer|object|form"):
            read_answer(wrong)
