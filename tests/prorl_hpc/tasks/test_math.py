"""Mathematics: answers that are right in another form, data sets, bad lines."""

import json
import threading

import pytest

pytest.importorskip("math_verify")

from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind, Outcome
from prorl_hpc.tasks.base import TaskError
from prorl_hpc.tasks.math import check
from prorl_hpc.tasks.registry import make_task


@pytest.mark.parametrize(
    ("expected", "response", "reward"),
    [
        ("1/2", "so it is \\boxed{\\frac{1}{2}}", 1.0),
        ("1/2", "\\boxed{0.5}", 1.0),
        ("-4", "-4", 1.0),
        ("x+1", "\\boxed{1+x}", 1.0),
        ("12", "\\boxed{13} no, \\boxed{12}", 1.0),
        ("12", "\\boxed{12} no, \\boxed{13}", 0.0),
        ("12", "<think>\\boxed{12}</think> \\boxed{7}", 0.0),
        ("12", "I don't know", 0.0),
    ],
)
def test_answers(expected, response, reward):
    assert check(expected, response).reward == reward


def test_no_answer_is_invalid():
    assert check("1", "<think>still").outcome is Outcome.invalid


def test_a_thread_may_score_too():
    found = []
    thread = threading.Thread(target=lambda: found.append(check("1/2", "\\boxed{0.5}").reward))
    thread.start()
    thread.join(60)
    assert found == [1.0]


def write(path, rows):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return str(path)


def rows(count):
    return [{"problem": f"{i}+{i}?", "answer": 2 * i} for i in range(count)]


def test_a_file_is_split_by_content(tmp_path):
    data = write(tmp_path / "a.jsonl", rows(10) + rows(3))
    task = make_task("math", TaskConfig(kind="math", data=data, validation_size=4), 0)
    sides = {
        kind: {task.instance(i, kind=kind).messages for i in range(task.size(kind))}
        for kind in Kind
    }
    assert len(sides[Kind.validation]) == 4
    assert len(sides[Kind.train]) == 6
    assert not sides[Kind.train] & sides[Kind.validation]
    instance = task.instance(0, kind=Kind.train)
    assert task.score(instance, task.demonstration(instance)).reward == 1.0


def test_nemo_gym_lines(tmp_path):
    line = {
        "responses_create_params": {
            "input": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
            ]
        },
        "expected_answer": "4",
    }
    data = write(tmp_path / "a.jsonl", [line])
    held = write(tmp_path / "b.jsonl", rows(1))
    config = TaskConfig(kind="math", data=data, validation_data=held)
    instance = make_task("math", config, 0).instance(0, kind=Kind.train)
    assert [m.role for m in instance.messages] == ["system", "user"]
    assert instance.answer == "4"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1"),
        ([{"problem": "1+1?", "answer": 2}, {"problem": "x"}], "line 2 has no field 'answer'"),
        ([{"problem": " ", "answer": 2}], "problem is empty"),
        ([{"problem": "x", "answer": True}], "isn't a text"),
        ([], "holds no problem"),
        (rows(3), "leaves nothing to train of 3"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path, lines, message):
    data = write(tmp_path / "a.jsonl", lines)
    with pytest.raises(TaskError, match=message):
        make_task("math", TaskConfig(kind="math", data=data), 0)


def test_a_missing_file_is_named():
    with pytest.raises(TaskError, match="can't be read"):
        make_task("math", TaskConfig(kind="math", data="/nowhere/a.jsonl"), 0)


@pytest.mark.parametrize("family", ["basic_arithmetic", "polynomial_equations", "gcd"])
def test_made_problems_accept_their_own_answers(family):
    pytest.importorskip("reasoning_gym")
    task = make_task("math", TaskConfig(kind="math", options={"families": [family]}), 0)
    for index in range(3):
        instance = task.instance(index, kind=Kind.train)
        assert task.score(instance, task.demonstration(instance)).reward == 1.0
        assert task.score(instance, "\\boxed{123456789}").reward == 0.0
