r"""Mathematics with one right answer, checked by math-verify. Knows no process pool.

Without `data` the problems are Reasoning Gym's; options then are

    families: [basic_arithmetic, simple_equations]
    parameters: {basic_arithmetic: {min_terms: 2}}

With `data`, lines are `{"problem", "answer"}` or NeMo Gym's (`responses_create_params`,
`expected_answer`). An answer is right if math-verify says so, or if it is written just like the
expected one: two verifiers, one of them is enough. math-verify bounds itself by alarms, which work
in a main thread only: answers are scored in processes (prorl_hpc.rollout.verifier).
"""

import re
import threading
from typing import Any

from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import JSON, Instance, Kind, Outcome, Score
from prorl_hpc.tasks.answers import after_thinking, boxed, read_options, tagged
from prorl_hpc.tasks.base import Task, TaskError
from prorl_hpc.tasks.logic import LogicTask, make_logic
from prorl_hpc.tasks.problems import Problem, ProblemTask, messages_of, split_problems, text_of

FAMILIES = ("basic_arithmetic", "simple_equations", "gcd", "lcm", "decimal_arithmetic")
"""Made when a recipe names neither data nor families."""

SECONDS = 5
"""Bound of each of math-verify's steps."""


def make_math(name: str, config: TaskConfig, seed: int) -> Task:
    """Raises TaskError."""
    options = read_options(name, config.options, {"families": list, "parameters": dict})
    if config.data is not None:
        if options:
            raise TaskError(
                f"tasks.{name}.options name families, but data={config.data!r}; drop one"
            )
        problems = split_problems(
            name, config, decode=lambda row: _decode(row, config.system_prompt)
        )
        return ProblemTask(
            name, problems, check=check, demonstrate=lambda answer: _box(str(answer))
        )
    puzzles = TaskConfig(
        kind="logic",
        options={
            "family": options.get("families", list(FAMILIES)),
            "parameters": options.get("parameters", {}),
        },
        train_size=config.train_size,
        validation_size=config.validation_size,
        system_prompt=config.system_prompt,
    )
    return MadeMath(make_logic(name, puzzles, seed))


class MadeMath:
    """Problems of Reasoning Gym, checked as mathematics."""

    def __init__(self, puzzles: LogicTask) -> None:
        self.name = puzzles.name
        self._puzzles = puzzles

    def size(self, kind: Kind) -> int:
        return self._puzzles.size(kind)

    def instance(self, index: int, *, kind: Kind) -> Instance:
        return self._puzzles.instance(index, kind=kind)

    def score(self, instance: Instance, response: str) -> Score:
        """Right if either math-verify or the family's own scorer says so."""
        candidate = candidate_in(response)
        if not candidate:
            return Score(reward=0.0, outcome=Outcome.invalid)
        own = self._puzzles.score(instance, candidate)
        if own.reward >= 1.0:
            return _scored(right=True, response=response)
        return check(instance.answer["entry"]["answer"], response)

    def demonstration(self, instance: Instance) -> str | None:
        answer = instance.answer["entry"].get("answer")
        return None if answer is None else _box(str(answer))


def check(expected: JSON, response: str) -> Score:
    """Binary reward; without any answer the outcome is `invalid`."""
    candidate = candidate_in(response)
    if not candidate:
        return Score(reward=0.0, outcome=Outcome.invalid)
    right = _same_text(str(expected), candidate) or equal(str(expected), candidate)
    return _scored(right=right, response=response)


def candidate_in(response: str) -> str:
    r"""What is offered as answer: the last `\boxed{}`, else `<answer>`, else the whole text."""
    text = after_thinking(response)
    return boxed(text) or tagged(text) or text


def equal(expected: str, candidate: str) -> bool:
    """Whether both are the same mathematical object, as far as math-verify can tell."""
    from math_verify import parse, verify

    seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
    bound: Any = seconds
    gold = parse(_marked(expected), parsing_timeout=bound)
    target = parse(_marked(candidate), parsing_timeout=bound)
    return bool(gold and target and verify(gold, target, timeout_seconds=bound))


def _decode(row: dict[str, Any], system_prompt: str | None) -> Problem:
    answer = row["expected_answer"] if "expected_answer" in row else row["answer"]
    return Problem(
        messages=messages_of(row, key="problem", system_prompt=system_prompt),
        answer=text_of(answer, "answer"),
        identity=str(row.get("id", "")),
    )


def _scored(*, right: bool, response: str) -> Score:
    has_box = float(boxed(after_thinking(response)) is not None)
    return Score(reward=float(right), components={"correct": float(right), "boxed": has_box})


def _same_text(expected: str, candidate: str) -> bool:
    return _squeezed(expected) == _squeezed(candidate) != ""


def _squeezed(text: str) -> str:
    return re.sub(r"[\s$]|\\left|\\right", "", text).rstrip(".").lower()


def _marked(text: str) -> str:
    """math-verify looks for LaTeX between dollars, and for plain expressions."""
    return text if "$" in text or "\\boxed" in text or len(text) > 200 else f"${text}$"


def _box(answer: JSON) -> str:
    return f"\\boxed{{{answer}}}"
