"""JSON output that fits a schema, from the user's rows.

A row is `{"prompt", "schema": {...}, "answer"?: value}`; the schema may be a text. Without `answer`
the reward is 1 when the output fits the schema; with it, the fraction of the answer's fields that
are right, and 0 where the schema isn't met. What JSON Schema means is the package jsonschema's
business; here is what a problem and a score are.
"""

import json
import re
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker, SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import JSON, Outcome, Score
from prorl_hpc.tasks.answers import after_thinking, read_json, read_options
from prorl_hpc.tasks.problems import Problem, ProblemTask, messages_of, split_problems

FORMATS = ("date", "email", "ipv4", "ipv6", "regex", "uuid")
"""Values of `format` that are checked. Each needs the standard library alone, so that a reward
doesn't depend on what else is installed; the others demand nothing."""

_FORMAT_CHECKER = FormatChecker(formats=FORMATS)


def make_structured(name: str, config: TaskConfig, seed: int) -> ProblemTask:  # noqa: ARG001
    """Raises TaskError."""
    read_options(name, config.options, {})
    problems = split_problems(name, config, decode=lambda row: _decode(row, config.system_prompt))
    return ProblemTask(name, problems, check=check, demonstrate=_demonstrate)


def check(wanted: JSON, response: str) -> Score:
    """`invalid` where there is no JSON at all."""
    try:
        value = read_json(json_in(response))
    except ValueError:
        return Score(reward=0.0, components={"json": 0.0}, outcome=Outcome.invalid)
    fits = fits_schema(value, wanted["schema"])
    right = _agreement(value, wanted["answer"]) if "answer" in wanted else 1.0
    components = {"json": 1.0, "schema": float(fits), "fields": right}
    return Score(reward=right if fits else 0.0, components=components)


def json_in(response: str) -> str:
    """The content of the last fenced block, else the whole text behind `</think>`."""
    text = after_thinking(response)
    blocks = re.findall(r"```(?:json)?[ \t\r]*\n(.*?)```", text, re.DOTALL)
    return str(blocks[-1]) if blocks else text


def fits_schema(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a decoded value fits a schema that `check_schema` let through."""
    try:
        return bool(_validator(schema).is_valid(value))
    except (RecursionError, OverflowError):  # a value as deep or as large as none that is meant
        return False


def check_schema(schema: object) -> None:
    """Raises ValueError for what isn't a schema, or one that refers to something outside itself."""
    if not isinstance(schema, dict):
        raise ValueError(f"schema={schema!r} isn't an object")
    if "$schema" in schema and validator_for(schema, default=None) is None:
        raise ValueError(f"schema.$schema={schema['$schema']!r} is no known version of JSON Schema")
    try:
        type(_validator(schema)).check_schema(schema)
    except SchemaError as err:
        raise ValueError(f"schema at {err.json_path}: {err.message}") from err
    resource = Resource.from_contents(schema, default_specification=DRAFT202012)
    resolver = Registry().with_resource(resource.id() or "", resource).resolver(resource.id() or "")
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except Unresolvable as err:
            raise ValueError(f"schema.$ref={reference!r} isn't in the schema itself") from err


def _references(part: Any) -> list[str]:
    """All `$ref` and `$dynamicRef` of a schema."""
    if isinstance(part, list):
        return [reference for inside in part for reference in _references(inside)]
    if not isinstance(part, dict):
        return []
    here = [part[key] for key in ("$ref", "$dynamicRef") if isinstance(part.get(key), str)]
    values = [value for key, value in part.items() if key not in ("const", "enum", "examples")]
    return here + _references(values)


def _validator(schema: dict[str, Any]) -> Validator:
    kind = validator_for(schema, default=Draft202012Validator)
    return kind(schema, registry=Registry(), format_checker=_FORMAT_CHECKER)


def _same(one: Any, two: Any) -> bool:
    """Equality of JSON values: 1 is 1.0, and neither is true."""
    if isinstance(one, bool) or isinstance(two, bool):
        return one is two
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_same, one, two))
    return bool(one == two)


def _agreement(value: Any, answer: Any) -> float:
    if isinstance(answer, dict) and answer and isinstance(value, dict):
        right = sum(key in value and _same(value[key], wanted) for key, wanted in answer.items())
        return right / len(answer)
    return float(_same(value, answer))


def _decode(row: dict[str, Any], system_prompt: str | None) -> Problem:
    schema = row["schema"]
    if isinstance(schema, str):  # Parquet can't hold values of any shape
        schema = read_json(schema)
    check_schema(schema)
    wanted = {"schema": schema} | ({"answer": row["answer"]} if "answer" in row else {})
    if "answer" in row and not fits_schema(row["answer"], schema):
        raise ValueError("the answer doesn't fit its own schema")
    return Problem(
        messages=messages_of(row, key="prompt", system_prompt=system_prompt),
        answer=wanted,
        identity=str(row.get("id", "")),
    )


def _demonstrate(wanted: JSON) -> str | None:
    return json.dumps(wanted["answer"]) if "answer" in wanted else None
