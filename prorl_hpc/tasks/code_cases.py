"""Programming problems as data sets tell them, turned into prompts and tests. Runs nothing.

Understood: MBPP (`text` or `prompt`, `test_list`), LiveCodeBench (`question_content`,
`public_test_cases`, `private_test_cases`, `metadata.func_name`), APPS and TACO (`question`,
`input_output`). Pickled test cases are refused: decoding them would run their author's code.
"""

import ast
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from prorl_hpc.records import JSON
from prorl_hpc.tasks.answers import prompt_messages
from prorl_hpc.tasks.problems import Problem, text_of

INSTRUCTION = "Answer with one complete Python program in a ```python block."
READS = "It reads standard input and prints to standard output."


class CaseKind(StrEnum):
    """How one test is run."""

    program = "program"
    """Standard input in, standard output compared."""
    expression = "expression"
    """An expression over the program's names; its value is compared."""
    assertion = "assertion"
    """A statement that must not raise, run beside the program: only where nothing else fits."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One test."""

    kind: CaseKind
    given: str
    """Standard input, or what the harness reads."""
    expected: str = ""
    """Standard output of `program`."""
    literal: JSON = None
    """Value of `expression`."""


def decode_problem(row: Mapping[str, Any], *, system_prompt: str | None) -> Problem:
    """A decoded line. Raises KeyError, ValueError or TypeError for a bad one."""
    key = next((k for k in ("question_content", "question", "text", "prompt", "problem")
                if row.get(k)), "question")  # fmt: skip
    text = text_of(row[key], key)
    cases = _cases(row)
    if not cases:
        raise ValueError("the problem has no test")
    starter = row.get("starter_code") or ""
    parts = [text.strip()]
    if starter.strip():
        parts.append(f"Start from this code:\n```python\n{starter.strip()}\n```")
    elif "test_list" in row:
        # the name that tests call must be known
        parts.append(f"For example:\n```python\n{row['test_list'][0]}\n```")
    reads = cases[0].kind is CaseKind.program
    parts.append(f"{INSTRUCTION} {READS}" if reads else INSTRUCTION)
    identity = next(
        (row[k] for k in ("question_id", "task_id", "problem_id", "id") if k in row), ""
    )
    return Problem(
        messages=prompt_messages("\n\n".join(parts), system_prompt=system_prompt),
        answer=cases,
        identity=str(identity),
        metadata={"solution": solution} if (solution := _solution(row)) else {},
    )


def _solution(row: Mapping[str, Any]) -> str:
    """A right program, as MBPP (`code`) and APPS (`solutions`) have it; empty: none is given."""
    found = row.get("code") or row.get("canonical_solution") or row.get("solutions") or ""
    if isinstance(found, str) and found.lstrip().startswith("["):
        found = _decoded(found)
    if isinstance(found, list):
        found = found[0] if found else ""
    return found.strip() if isinstance(found, str) else ""


def _cases(row: Mapping[str, Any]) -> list[Case]:
    if "test_list" in row:
        setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
        return [assertion_case(str(test), setup=setup) for test in row["test_list"]]
    if "input_output" in row:
        packed = _decoded(row["input_output"])
        name = packed.get("fn_name")
        inputs, outputs = packed["inputs"], packed["outputs"]
        if len(inputs) != len(outputs):
            raise ValueError(f"{len(inputs)} inputs, but {len(outputs)} outputs")
        return [_case(i, o, function=name) for i, o in zip(inputs, outputs, strict=True)]
    metadata = _decoded(row.get("metadata") or {})
    name = metadata.get("func_name")
    tests = [
        *_decoded(row.get("public_test_cases") or []),
        *_decoded(row.get("private_test_cases") or []),
    ]
    cases = []
    for test in tests:
        functional = test.get("testtype") == "functional"
        if functional and not name:
            raise ValueError("a functional test needs metadata.func_name")
        if functional:
            arguments = [json.loads(line) for line in test["input"].splitlines() if line.strip()]
            cases.append(_case(arguments, json.loads(test["output"]), function=name))
        else:
            cases.append(_case(test["input"], test["output"], function=None))
    return cases


def _case(given: JSON, expected: JSON, *, function: str | None) -> Case:
    if function is None:
        return Case(kind=CaseKind.program, given=_lines(given), expected=_lines(expected))
    if not function.replace(".", "_").isidentifier():
        raise ValueError(f"function name {function!r} isn't a name")
    if not isinstance(given, list):
        raise ValueError(f"arguments {given!r} aren't a list")
    call = f"__call__({function!r}, {given!r})"
    return Case(kind=CaseKind.expression, given=_request("", call), literal=expected)


def assertion_case(test: str, *, setup: str) -> Case:
    """`assert CALL == LITERAL` becomes an expression and its value; others stay statements."""
    try:
        tree = ast.parse(test.strip())
    except SyntaxError as err:
        raise ValueError(f"test {test!r} isn't Python: {err.msg}") from err
    match tree.body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            try:
                literal = ast.literal_eval(right)
            except ValueError:
                pass
            else:
                given = _request(setup, ast.unparse(left))
                return Case(kind=CaseKind.expression, given=given, literal=plain(literal))
    return Case(kind=CaseKind.assertion, given=_request(f"{setup}\n{test}", "True"))


def _request(setup: str, expression: str) -> str:
    return json.dumps({"setup": setup, "expression": expression})


def plain(value: JSON) -> JSON:
    """Sets and tuples as lists: the comparison treats them alike, and records hold JSON."""
    if isinstance(value, set | frozenset):
        return {"set": sorted((plain(one) for one in value), key=repr)}
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {"items": [[plain(k), plain(v)] for k, v in value.items()]}
    return value


def _decoded(value: JSON) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as err:
        raise ValueError(
            "tests aren't JSON (compressed pickles aren't read: convert them to JSON first)"
        ) from err


def _lines(value: JSON) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
