"""Pieces between marks: as a lazy pattern finds them, in time that grows with the text alone."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_hpc.agents.spans import enclosed
from prorl_hpc.agents.tools import calls_in, spell_call, split_answer
from prorl_hpc.tasks.answers import boxed, tagged

MANY = 300_000
"""Marks. In time that grows with their square this takes hours."""

pieces = st.lists(st.sampled_from(["<a>", "</a>", "x", "<", "a>", "\n"]), max_size=30).map("".join)
braces = st.lists(st.sampled_from(["\\boxed{", "{", "}", "x", "\\boxed"]), max_size=20).map("".join)


@given(pieces)
def test_as_a_lazy_pattern(text: str) -> None:
    found = [text[start:end] for start, end in enclosed(text, opening="<a>", closing="</a>")]
    assert found == re.findall("<a>(.*?)</a>", text, re.DOTALL)


def by_counting(text: str) -> str | None:
    """The last box by its definition: from its brace on, as many close as open."""
    for start in range(len(text) - 1, -1, -1):
        if text.startswith("\\boxed{", start):
            depth = 0
            for place in range(start + 6, len(text)):
                depth += {"{": 1, "}": -1}.get(text[place], 0)
                if depth == 0:
                    return text[start + 7 : place].strip()
    return None


@given(braces)
def test_boxes_as_by_counting(text: str) -> None:
    assert boxed(text) == by_counting(text)


@pytest.mark.parametrize(
    "text", ["<tool_call>" * MANY, "<answer>" * MANY, "\\boxed{" * MANY, "{" * MANY]
)
def test_marks_that_are_never_closed_take_no_time(text: str) -> None:
    assert calls_in(text) == []
    assert split_answer(text) == (text, [])
    assert tagged(text) is None
    assert boxed(text) is None


def test_what_an_answer_says_beside_its_calls() -> None:
    one, bad = spell_call("a", {}), "<tool_call>{</tool_call>"
    said, calls = split_answer(f"first {one}{bad} then {one} last")
    assert said == f"first {bad} then  last"
    assert [call.name for call in calls] == ["a", "a"]
