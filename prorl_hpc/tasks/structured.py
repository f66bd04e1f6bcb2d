"""JSON output that fits a schema, from JSON lines.

A line is `{"prompt", "schema": {...}, "answer"?: value}`. Without `answer` the reward is 1 when
the output fits the schema; with it, the fraction of the answer's fields that are right, and 0
where the schema isn't met. Of JSON Schema these words count: type, properties, required,
additionalProperties (false), items, minItems, maxItems, enum, const, minimum, maximum, minLength,
maxLength, pattern; a schema with another one is refused, never half-checked.
"""

import json
import re
from typing import Any

from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import JSON, Outcome, Score
from prorl_hpc.tasks.answers import after_thinking, read_options
from prorl_hpc.tasks.jsonl import Problem, ProblemTask, messages_of, split_problems

TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}

WORDS = {
    "type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems",
    "enum", "const", "minimum", "maximum", "minLength", "maxLength", "pattern",
}  # fmt: skip

NOTES = {"title", "description", "default", "examples", "$schema", "$id"}
"""Words that demand nothing."""


def make_structured(name: str, config: TaskConfig, seed: int) -> ProblemTask:  # noqa: ARG001
    """Raises TaskError."""
    read_options(name, config.options, {})
    problems = split_problems(name, config, decode=lambda row: _decode(row, config.system_prompt))
    return ProblemTask(name, problems, check=check, demonstrate=_demonstrate)


def check(wanted: JSON, response: str) -> Score:
    """`invalid` where there is no JSON at all."""
    try:
        value = json.loads(json_in(response))
    except (ValueError, RecursionError):
        return Score(reward=0.0, components={"json": 0.0}, outcome=Outcome.invalid)
    fits = fits_schema(value, wanted["schema"])
    right = _agreement(value, wanted["answer"]) if "answer" in wanted else 1.0
    components = {"json": 1.0, "schema": float(fits), "fields": right}
    return Score(reward=right if fits else 0.0, components=components)


def json_in(response: str) -> str:
    """The content of the last fenced block, else the whole text behind `</think>`."""
    text = after_thinking(response)
    blocks = re.findall(r"```(?:json)?\s*\n(.*?)```", text, re.DOTALL)
    return str(blocks[-1]) if blocks else text


def fits_schema(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a decoded value fits a schema of the supported words."""
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if "enum" in schema and not any(_same(value, option) for option in schema["enum"]):
        return False
    names = schema.get("type", [])
    if names and not any(_is(value, n) for n in ([names] if isinstance(names, str) else names)):
        return False
    if isinstance(value, dict):
        return _fits_object(value, schema)
    if isinstance(value, list):
        inside = schema.get("items", {})
        bounds = (schema.get("minItems", 0), schema.get("maxItems", len(value)))
        return bounds[0] <= len(value) <= bounds[1] and all(fits_schema(v, inside) for v in value)
    if isinstance(value, str):
        bounds = (schema.get("minLength", 0), schema.get("maxLength", len(value)))
        return bounds[0] <= len(value) <= bounds[1] and (
            re.search(schema.get("pattern", ""), value) is not None
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return True


def _fits_object(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    properties = schema.get("properties", {})
    if any(key not in value for key in schema.get("required", [])):
        return False
    if schema.get("additionalProperties") is False and not set(value) <= set(properties):
        return False
    return all(
        fits_schema(value[key], inside) for key, inside in properties.items() if key in value
    )


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[name])


def _same(one: Any, two: Any) -> bool:
    """Equality in which true isn't 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)


def _agreement(value: Any, answer: Any) -> float:
    if isinstance(answer, dict) and answer and isinstance(value, dict):
        right = sum(key in value and _same(value[key], wanted) for key, wanted in answer.items())
        return right / len(answer)
    return float(_same(value, answer))


def _decode(row: dict[str, Any], system_prompt: str | None) -> Problem:
    schema = row["schema"]
    _check_schema(schema)
    wanted = {"schema": schema} | ({"answer": row["answer"]} if "answer" in row else {})
    if "answer" in row and not fits_schema(row["answer"], schema):
        raise ValueError("the answer doesn't fit its own schema")
    return Problem(
        messages=messages_of(row, key="prompt", system_prompt=system_prompt),
        answer=wanted,
        identity=str(row.get("id", "")),
    )


def _check_schema(schema: object) -> None:
    if not isinstance(schema, dict):
        raise ValueError(f"schema={schema!r} isn't an object")
    for word in schema:
        if word not in WORDS | NOTES:
            raise ValueError(
                f"schema word {word!r} isn't supported; use {', '.join(sorted(WORDS))}"
            )
    names = schema.get("type", [])
    for name in [names] if isinstance(names, str) else names:
        if name not in TYPES:
            raise ValueError(f"schema type {name!r}; choose of {', '.join(TYPES)}")
    re.compile(schema.get("pattern", ""))
    for inside in schema.get("properties", {}).values():
        _check_schema(inside)
    if "items" in schema:
        _check_schema(schema["items"])


def _demonstrate(wanted: JSON) -> str | None:
    return json.dumps(wanted["answer"]) if "answer" in wanted else None
