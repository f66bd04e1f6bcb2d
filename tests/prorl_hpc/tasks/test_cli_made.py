"""Hundreds of made problems: doing nothing earns nothing, the known solution everything.

Solutions are this project's own scripts, run here in directories of their own; the same ones run in
real sandboxes in test_cli_sandbox.py.
"""

import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from prorl_hpc.choices import AgentKind, EnvironmentKind
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind
from prorl_hpc.tasks.base import TaskError
from prorl_hpc.tasks.cli.checks import Check, judge
from prorl_hpc.tasks.cli.made import FAMILIES, make_problem
from prorl_hpc.tasks.cli.problem import WORK, CliProblem, decode_row
from prorl_hpc.tasks.cli.source import MadeUp, read_source
from prorl_hpc.tasks.cli.state import Entry, EntryKind
from prorl_hpc.tasks.tools.rows import decode_row as decode_calls

NAMES = tuple(FAMILIES)


def make(number: int, level: int, parts: int = 1) -> CliProblem:
    return make_problem(
        1000 * number + level, families=NAMES, first=number, levels=(level, level),
        parts=(parts, parts),
    )  # fmt: skip


def write(state: dict[str, Entry], root: Path) -> Path:
    """Lays a state out below `root`; returns the working directory."""
    for path, entry in sorted(state.items()):
        target = root / path.lstrip("/")
        if entry.kind is EntryKind.directory:
            target.mkdir(parents=True, exist_ok=True)
        elif entry.kind is EntryKind.link:
            target.symlink_to(entry.target)
        else:
            target.write_bytes(entry.data)
            target.chmod(entry.mode)
    return root / WORK.lstrip("/")


def read(root: Path) -> dict[str, Entry]:
    state = {}
    for path in [root / WORK.lstrip("/"), *root.rglob("*")]:
        name = f"/{path.relative_to(root)}"
        if path.is_symlink():
            state[name] = Entry(kind=EntryKind.link, target=str(path.readlink()))
        elif path.is_dir():
            state[name] = Entry(kind=EntryKind.directory)
        else:
            mode = path.stat().st_mode & 0o7777
            state[name] = Entry(kind=EntryKind.file, data=path.read_bytes(), mode=mode)
    return state


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_doing_nothing_earns_nothing(level: int) -> None:
    for number in range(4 * len(NAMES)):
        problem = make(number, level, parts=1 + number % 3)
        verdict = judge(problem.checks, problem.state(), directory=WORK)
        assert verdict.guarded, (problem.id, number)
        assert (verdict.num_held, verdict.num_goals > 0) == (0, True), (problem.id, number)


@pytest.mark.parametrize("family", NAMES)
def test_the_solution_does_everything(family: str, tmp_path: Path) -> None:
    variables = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    for number in range(9):
        parts = 2 if number == 8 else 1
        place = NAMES.index(family) + number * len(NAMES)
        problem = make(place, level=1 + number % 5, parts=parts)
        root = tmp_path / str(number)
        work = write(problem.state(), root)
        done = subprocess.run(
            ["bash", "-c", problem.solution], cwd=work, env=variables, capture_output=True,
            text=True, timeout=240, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        verdict = judge(problem.checks, read(root), directory=WORK)
        assert verdict.guarded, (problem.instruction, problem.solution, done.stderr)
        assert verdict.num_held == verdict.num_goals, (problem.instruction, done.stderr)


def test_equal_prompts_have_equal_solutions() -> None:
    solutions: dict[str, set[str]] = {}
    for number in range(40 * len(NAMES)):
        problem = make(number, level=1)
        solutions.setdefault(problem.instruction, set()).add(problem.solution)
    assert [text for text, found in solutions.items() if len(found) > 1] == []


def test_there_is_variety() -> None:
    problems = [make(number, level=2) for number in range(10 * len(NAMES))]
    assert len({problem.instruction for problem in problems}) == len(problems)
    kinds = Counter(check.__class__.__name__ for problem in problems for check in problem.checks)
    assert len(kinds) >= 9, kinds
    sizes = [len(make(NAMES.index("find_files"), level).files) for level in (1, 3, 5)]
    assert sizes == sorted(set(sizes))


def source(**options: object) -> MadeUp:
    made = read_source("cli", TaskConfig(kind="cli", options=dict(options)), 0)
    assert isinstance(made, MadeUp)
    return made


def test_a_number_is_always_the_same_problem_and_no_side_has_the_others() -> None:
    one, two = source(level=[1, 3], parts=[1, 2]), source(level=[1, 3], parts=[1, 2])
    seen = {kind: [one.problem(index, kind=kind) for index in range(40)] for kind in Kind}
    assert seen[Kind.train][7] == two.problem(7, kind=Kind.train)
    texts = {kind: {(p.instruction, str(p.files)) for p in seen[kind]} for kind in Kind}
    assert not texts[Kind.train] & texts[Kind.validation]
    assert [p.id.partition("-")[0].partition("+")[0] for p in seen[Kind.train][:3]] == list(
        NAMES[:3]
    )
    with pytest.raises(IndexError):
        one.problem(64, kind=Kind.validation)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"families": ["find_file"]}, "did you mean 'find_files'"),
        ({"families": []}, "give a list"),
        ({"level": 6}, "level=6"),
        ({"level": [3, 1]}, "from 1 to 5"),
        ({"level": True}, "level=True"),
        ({"parts": [1, 9]}, "from 1 to 4"),
    ],
)
def test_options_that_are_wrong(options: dict[str, object], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        source(**options)


ROW = {"instruction": "Count.", "files": {"a": "x"}, "checks": [{"check": "exists", "path": "n"}]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"instruction": " "}, "instruction is empty"),
        ({"checks": []}, "nothing is checked"),
        ({"checks": [{"check": "exists", "path": "a"}]}, "holds before anything is done"),
        ({"checks": [{"check": "exist", "path": "a"}]}, "Invalid value 'exist'"),
        ({"files": {"../a": "x"}}, "isn't below"),
        ({"files": {"a": "x", "a/b": "y"}}, "stands where a directory"),
        ({"files": {"a": {"text": "x", "link": "y"}}}, "exactly one of"),
        ({"files": {"a": {"base64": "%"}}}, "base64"),
        ({"workdir": "/proc/self"}, "can't be looked at"),
        ({"workdir": "work"}, "absolute paths"),
        ({"keep": ["/tmp"]}, "can't be looked at"),
        ({"timeout_seconds": 0}, "must be positive"),
        ({"verfy": "true"}, "verfy"),
    ],
)
def test_lines_that_are_wrong(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode_row(ROW | changes)


def test_a_line_may_have_a_script_or_several() -> None:
    assert decode_row(ROW | {"checks": [], "verify": "test -e n"}).verify == {"verify": "test -e n"}
    assert decode_row(ROW | {"verify": {"one": "true"}}).verify == {"one": "true"}
    with pytest.raises(KeyError, match="instruction"):
        decode_row({"checks": []})


def test_data_and_families_are_one_or_the_other(tmp_path: Path) -> None:
    config = TaskConfig(kind="cli", data="x.jsonl", options={"level": 2})
    with pytest.raises(TaskError, match=r"options\.level is for problems that are made"):
        read_source("cli", config, 0)


@pytest.mark.parametrize("agent", list(AgentKind))
def test_the_prompt_says_what_counts(agent: AgentKind) -> None:
    from prorl_hpc.tasks.cli.task import make_cli

    config = TaskConfig(
        kind="cli", environment=EnvironmentKind.bubblewrap, agent=agent, max_turns=8
    )
    task = make_cli("cli", config, 0)
    instance = task.instance(3, kind=Kind.train)
    text = instance.messages[-1].content
    assert WORK in text
    assert ("one ```bash block" in text) is (agent is AgentKind.single_turn)
    assert task.solution_for(instance.messages) == instance.answer.solution
    assert (task.demonstration(instance) is None) is (agent is not AgentKind.single_turn)


def test_the_lines_that_the_guide_shows_can_be_read() -> None:
    guide = (Path(__file__).parents[3] / "docs/tasks.md").read_text()
    blocks = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", guide, re.DOTALL)]
    shell, functions = blocks
    assert decode_row(shell).verify.keys() == {"sorted", "as expected"}
    assert len(decode_calls(functions, system_prompt=None).answer.calls) == 2
    named = set(re.findall(r"`([a-z_]+)`", guide.partition("### cli")[2].partition("Lines of")[0]))
    assert named >= set(NAMES)
    kinds = {config.__struct_config__.tag for config in Check.__args__}
    words = guide.partition("Checks: ")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([a-z0-9_]+)`", words)) >= kinds
