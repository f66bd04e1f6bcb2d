"""Programming problems: their forms, comparison of results, and programs in a real sandbox."""

import asyncio
import json
from pathlib import Path

import pytest

from hpc.container_probe import probe
from hpc.images import ImageStore
from prorl_hpc.choices import EnvironmentKind
from prorl_hpc.environment.factory import EnvironmentFactory
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind, Outcome, Score
from prorl_hpc.tasks.base import TaskError
from prorl_hpc.tasks.code import LIMITS, CodeTask, make_code, program_in
from prorl_hpc.tasks.code_cases import CaseKind, assertion_case, decode_problem
from prorl_hpc.tasks.code_compare import same_output, same_value
from tests.prorl_hpc.tasks.swe_bug import need_bubblewrap

MBPP = {
    "task_id": 1, "text": "Write a function that doubles numbers.",
    "test_list": ["assert double(2) == 4", "assert double([1]) == [1, 1]",
                  "assert set(double('a')) == {'a'}"],
}  # fmt: skip
LIVE = {
    "question_id": "q", "question_content": "Add the two numbers of each line.",
    "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
    "private_test_cases": [{"input": "2 2\n5 5\n", "output": "4\n10\n", "testtype": "stdin"}],
    "metadata": "{}",
}  # fmt: skip
CALLS = {
    "question_id": "f", "question_content": "Sum a list.", "starter_code": "class Solution:\n",
    "public_test_cases": [
        {"input": "[1, 2]", "output": "3", "testtype": "functional"},
        {"input": "[0.1, 0.2]", "output": "0.3", "testtype": "functional"},
    ],
    "metadata": '{"func_name": "total"}',
}  # fmt: skip
APPS = {"problem_id": 4, "question": "Print it twice.",
        "input_output": '{"inputs": ["a", "b"], "outputs": ["aa", "bb"]}'}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "kinds", "identity"),
    [
        (MBPP, ["expression"] * 3, "1"),
        (LIVE, ["program"] * 2, "q"),
        (CALLS, ["expression"] * 2, "f"),
        (APPS, ["program"] * 2, "4"),
    ],
)
def test_forms(row: dict[str, object], kinds: list[str], identity: str) -> None:
    problem = decode_problem(row, system_prompt=None)
    assert [case.kind for case in problem.answer] == kinds
    assert problem.identity == identity
    assert "```python" in problem.messages[-1].content


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x", "test_list": []}, "no test"),
        ({"text": "x", "test_list": ["assert ("]}, "isn't Python"),
        (LIVE | {"private_test_cases": "eJxr"}, "aren't JSON"),
        (CALLS | {"metadata": {}}, "func_name"),
        (APPS | {"input_output": {"inputs": ["a"], "outputs": []}}, "1 inputs, but 0 outputs"),
        (APPS | {"input_output": {"inputs": [[1]], "outputs": [1], "fn_name": "a b"}}, "a name"),
    ],
)  # fmt: skip
def test_bad_rows(row: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_problem(row, system_prompt=None)


def test_only_what_no_expression_can_say_stays_an_assertion() -> None:
    assert assertion_case("assert f(1) == (1, {2: 'x'})", setup="").kind is CaseKind.expression
    assert assertion_case("assert f(1) == g(2)", setup="").kind is CaseKind.assertion
    assert assertion_case("assert f(1)", setup="").kind is CaseKind.assertion


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("3\n", "3", True), ("3 4 \n5\n\n", "3  4\n5", True), ("3\n4", "3 4", False),
        ("0.30000001", "0.3", True), ("0.31", "0.3", False), ("3.0", "3", False),
        ("", "", True), ("", "0", False), ("YES", "yes", False), ("nan", "nan.", False),
    ],
)  # fmt: skip
def test_outputs(found: str, expected: str, same: bool) -> None:
    assert same_output(found, expected) == same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ((1, [2, "x"]), [1, [2, "x"]], True), ([1], [2], False), (True, 1, False), (1, True, False),
        (True, True, True), (None, None, True), (0.1 + 0.2, 0.3, True), (1, 1.0, True),
        (10**400, 0.5, False), ({1, 2}, {"set": [1, 2]}, True), ({1}, [1], False),
        ({1: "a"}, {"1": "a"}, True), ({1: "a"}, {"items": [[1, "a"]]}, True),
        ({1: "a"}, {"items": [[1, "b"]]}, False), ("1", 1, False), ([], [], True),
    ],
)  # fmt: skip
def test_values(found: object, expected: object, same: bool) -> None:
    assert same_value(found, expected) == same


def test_the_program_of_an_answer() -> None:
    assert program_in("```python\na = 1\n```\nor\n```py\nb = 2\n```") == "b = 2\n"
    assert program_in("<think>```python\nx\n```</think>no block") is None
    assert program_in("```\nc = 3\n```") == "c = 3\n"


def config(path: Path, *rows: object, **options: object) -> TaskConfig:
    filler = APPS | {"question": "Set apart."}
    path.write_text("".join(json.dumps(one) + "\n" for one in (*rows, filler)))
    return TaskConfig(
        kind="code", data=str(path), validation_data=str(path.with_name("held.jsonl")),
        validation_size=1, environment=EnvironmentKind.bubblewrap, score_timeout_seconds=200.0,
        options=options,
    )  # fmt: skip


def make(tmp_path: Path, *rows: object, **options: object) -> CodeTask:
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps(APPS | {"question": "Set apart."}) + "\n")
    return make_code("code", config(tmp_path / "code.jsonl", *rows, **options), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"second_per_test": 1}, "unknown"),
        ({"seconds_per_test": 0}, "must be positive"),
        ({"num_tests": 0}, "at least 1"),
        ({"reward": "most"}, "fraction or all"),
        ({"seconds_per_test": "x"}, "options"),
        ({"limits": {"memory": 1}}, "limits.memory is unknown; did you mean memory_bytes"),
        ({"limits": {"memory_bytes": 1.5}}, "isn't a whole number"),
        ({"limits": {"wall_seconds": True}}, "isn't a number"),
        ({"limits": {"num_processes": 0}}, "limits.num_processes=0 must be positive"),
        ({"limits": [1]}, "isn't a mapping"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make(tmp_path, MBPP, **options)


def test_limits_of_the_recipe(tmp_path: Path) -> None:
    task = make(tmp_path, MBPP, limits={"num_processes": 7, "wall_seconds": 60})
    limits = task.environment_spec(task.instance(0, kind=Kind.train)).limits
    assert (limits.num_processes, limits.wall_seconds) == (7, 60)
    assert limits.memory_bytes == LIMITS.memory_bytes


def test_images_are_unpacked_where_the_recipe_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime is a stand-in that makes a directory; tests/cluster/test_images.py has a real
    one."""
    runtime = tmp_path / "apptainer"
    runtime.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo apptainer version 1.3.0; exit; }\n'
        'for word; do target=$before; before=$word; done; mkdir -p "$target/bin"\n'
    )
    runtime.chmod(0o755)
    monkeypatch.setenv("PRORL_APPTAINER", str(runtime))
    probe.cache_clear()
    (tmp_path / "images").mkdir()
    store = ImageStore(tmp_path / "images")
    store.ensure("code", source="s", source_key="k", make=lambda path: path.write_bytes(b"sif"))
    task = make(tmp_path, MBPP, image="code", images=str(store.root), unpack=str(tmp_path / "node"))
    instance = task.instance(0, kind=Kind.train)
    image = task.environment_spec(instance).image
    probe.cache_clear()
    assert image == tmp_path / "node" / f"code-{store.record('code').sha256[:16]}"
    assert (image / "bin").is_dir()
    assert task.environment_spec(instance).image == image


# --- in a sandbox ------------------------------------------------------------------------------


def scores(task: CodeTask, tmp_path: Path, *programs: str) -> list[Score]:
    """The scores of programs for the only training problem."""

    async def work() -> list[Score]:
        factory = EnvironmentFactory(tmp_path / "scratch")
        try:
            instance = task.instance(0, kind=Kind.train)
            return [
                await task.score_in(
                    instance, result=b"", response=f"```python\n{program}\n```",
                    make_environment=factory.create,
                )
                for program in programs
            ]  # fmt: skip
        finally:
            factory.close()

    need_bubblewrap()
    return asyncio.run(work())


@pytest.mark.process
def test_programs_that_read_and_print(tmp_path: Path) -> None:
    task = make(tmp_path, LIVE)
    right = "import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))"
    found = scores(task, tmp_path, right, "print(3)", "raise SystemExit(3)")
    assert [one.reward for one in found] == [1.0, 0.5, 0.0]
    assert found[0].components == {"fraction": 1.0, "all_passed": 1.0}


@pytest.mark.process
def test_functions_that_are_called(tmp_path: Path) -> None:
    task = make(tmp_path, CALLS)
    method = "class Solution:\n    def total(self, a, b):\n        return a + b"
    plain = "print('noise')\ndef total(a, b):\n    return a + b"
    row = {"input": "[1, 2]\n", "output": "3", "testtype": "functional"}
    one = make(tmp_path, CALLS | {"public_test_cases": [row]})
    assert scores(one, tmp_path, "class Solution:\n    def total(self, a):\n        return sum(a)")[
        0
    ].reward == 1.0  # fmt: skip
    assert task.size(Kind.train) == 1
    assert [s.reward for s in scores(task, tmp_path, method, plain)] == [0.0, 0.0]


@pytest.mark.process
def test_assertions_and_answers_that_cheat(tmp_path: Path) -> None:
    task = make(tmp_path, MBPP)
    right = "def double(x):\n    return x * 2"
    equal_to_all = (
        "class Any:\n    def __eq__(self, other):\n        return True\n"
        "    def __repr__(self):\n        return '4'\n"
        "def double(x):\n    return Any()"
    )
    leaves = "import os\ndef double(x):\n    os._exit(0)"
    found = scores(task, tmp_path, right, equal_to_all, leaves, "import sys\nsys.exit(0)")
    assert [one.reward for one in found] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.process
def test_endless_programs_cost_their_seconds_only(tmp_path: Path) -> None:
    task = make(tmp_path, APPS, seconds_per_test=2.0, num_tests=1, reward="all")
    (found,) = scores(task, tmp_path, "while True:\n    pass")
    assert found.reward == 0.0
    assert found.outcome is Outcome.scored


@pytest.mark.process
def test_an_answer_without_a_program(tmp_path: Path) -> None:
    task = make(tmp_path, APPS)
    (found,) = scores(task, tmp_path, "")
    assert found.outcome is Outcome.invalid
