"""Lines of a data set of expected calls: the user's prompt, the functions, the right answer.

    {"prompt": "Weather in Rome and Oslo?", "tools": [{"name": "weather", "description": "...",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}],
     "calls": [{"name": "weather", "arguments": {"city": "Rome"},
                "allowed": {"unit": ["C", "celsius"]}, "optional": ["unit"]}, ...],
     "ordered": false}

BFCL's fields are read too: `question`, `function`, `ground_truth` (or `possible_answer`). Without
any call that is expected, an answer in words is right. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from prorl_hpc.agents.render import ToolSchema
from prorl_hpc.agents.tools import spell_call
from prorl_hpc.records import Message
from prorl_hpc.tasks.answers import prompt_messages
from prorl_hpc.tasks.jsonl import Problem, text_of
from prorl_hpc.tasks.tools.match import LEFT_OUT, Expected
from prorl_hpc.tasks.tools.schemas import OTHER_NAMES, TYPES

ROLES = ("system", "user", "assistant")
MAX_DEPTH = 32
"""Of a function's schema."""


class Listed(msgspec.Struct, frozen=True, kw_only=True, tag="listed"):
    """What an instance of a data set is led and scored by."""

    tools: list[ToolSchema]
    calls: list[Expected]
    ordered: bool = False


def decode_row(row: Mapping[str, Any], *, system_prompt: str | None) -> Problem:
    """Raises KeyError, ValueError or TypeError for a bad line."""
    try:
        return _decoded(row, system_prompt=system_prompt)
    except AttributeError as err:  # a number where an object is needed, somewhere within
        raise ValueError(f"something in the line has another form: {err}") from err


def _decoded(row: Mapping[str, Any], *, system_prompt: str | None) -> Problem:
    given = row["tools"] if "tools" in row else row["function"]
    tools = [tool_schema(tool) for tool in (given if isinstance(given, list) else [given])]
    names = [tool["function"]["name"] for tool in tools]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"tools {names!r} must be some, with distinct names")
    calls = expected_calls(row)
    for call in calls:
        if call.name not in names:
            raise ValueError(f"expected call {call.name!r} is none of the tools {', '.join(names)}")
    answer = Listed(tools=tools, calls=calls, ordered=bool(row.get("ordered", False)))
    return Problem(
        messages=_messages(row, system_prompt=system_prompt),
        answer=answer,
        identity=str(row.get("id", "")),
    )


def tool_schema(tool: Any) -> ToolSchema:
    """A function in the form that chat templates take. Raises ValueError or KeyError."""
    if not isinstance(tool, dict):
        raise ValueError(f"tool {tool!r:.40} isn't an object")
    function = tool.get("function", tool)
    if not isinstance(function, dict):
        raise ValueError(f"function {function!r:.40} isn't an object")
    parameters = plain_schema(function.get("parameters") or {"type": "object", "properties": {}})
    return {
        "type": "function",
        "function": {
            "name": text_of(function["name"], "name"),
            "description": str(function.get("description") or ""),
            "parameters": parameters,
        },
    }


def plain_schema(schema: Any, depth: int = 0) -> dict[str, Any]:
    """The schema with JSON Schema's own names of types. Raises ValueError."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        raise ValueError(f"schema {schema!r:.60} isn't an object (or is too deep)")
    made = dict(schema)
    name = made.get("type")
    if isinstance(name, str):
        made["type"] = OTHER_NAMES.get(name, name)
        if made["type"] == "any":
            del made["type"]
        elif made["type"] not in TYPES:
            raise ValueError(f"type {name!r} is unknown; choose of {', '.join(TYPES)}")
    if "properties" in made:
        properties = made["properties"].items()
        made["properties"] = {key: plain_schema(one, depth + 1) for key, one in properties}
    if isinstance(made.get("items"), dict):
        made["items"] = plain_schema(made["items"], depth + 1)
    return made


def expected_calls(row: Mapping[str, Any]) -> list[Expected]:
    """Raises KeyError, ValueError or TypeError."""
    if "calls" in row:
        return [_own(call) for call in row["calls"]]
    truth = row["ground_truth"] if "ground_truth" in row else row["possible_answer"]
    return [_published(name, arguments) for call in truth for name, arguments in call.items()]


def _own(call: Mapping[str, Any]) -> Expected:
    exact, allowed = call.get("arguments", {}), call.get("allowed", {})
    both = sorted(set(exact) & set(allowed))
    if both:
        raise ValueError(f"argument {both[0]!r} is in `arguments` and in `allowed`; drop one")
    values = {name: [value] for name, value in exact.items()} | _lists(allowed)
    optional = [str(name) for name in call.get("optional", ())]
    unknown = sorted(set(optional) - set(values))
    if unknown:
        raise ValueError(f"optional argument {unknown[0]!r} has no value; give it in `allowed`")
    return Expected(name=text_of(call["name"], "name"), allowed=values, optional=optional)


def _published(name: str, arguments: Mapping[str, Any]) -> Expected:
    lists = _lists(arguments)
    return Expected(
        name=name,
        allowed={key: [v for v in values if v != LEFT_OUT] for key, values in lists.items()},
        optional=[key for key, values in lists.items() if LEFT_OUT in values],
        nested=True,
    )


def _lists(allowed: Mapping[str, Any]) -> dict[str, list[Any]]:
    for name, values in allowed.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"allowed values of {name!r} are {values!r:.60}; give a list of some")
    return {name: list(values) for name, values in allowed.items()}


def _messages(row: Mapping[str, Any], *, system_prompt: str | None) -> tuple[Message, ...]:
    given = row["prompt"] if "prompt" in row else row["question"]
    while isinstance(given, list) and given and isinstance(given[0], list):
        if len(given) > 1:
            raise ValueError("the question has several turns; only one is asked here")
        given = given[0]
    if not isinstance(given, list):
        return prompt_messages(text_of(given, "prompt"), system_prompt=system_prompt)
    messages = tuple(Message(role=part["role"], content=part["content"]) for part in given)
    for message in messages:
        if message.role not in ROLES or not isinstance(message.content, str):
            raise ValueError(f"message of role {message.role!r} isn't text of {', '.join(ROLES)}")
    if not messages or messages[-1].role != "user":
        raise ValueError("the prompt must end with a message of the user")
    if system_prompt is None or messages[0].role == "system":
        return messages
    return (Message(role="system", content=system_prompt), *messages)


def spelled(calls: Sequence[Expected]) -> str:
    """The expected calls as a model would write them."""
    parts = []
    for call in calls:
        values = {
            name: _first(values[0], nested=call.nested)
            for name, values in call.allowed.items()
            if values
        }
        parts.append(spell_call(call.name, values))
    return "\n".join(parts) or "None of the functions helps here."


def _first(value: Any, *, nested: bool) -> Any:
    """A value that is right, of a form in which objects may hold lists of them."""
    if not nested or not isinstance(value, dict):
        return value
    chosen = {
        key: next((one for one in inside if one != LEFT_OUT), None)
        if isinstance(inside, list)
        else inside
        for key, inside in value.items()
    }
    return {key: _first(one, nested=True) for key, one in chosen.items() if one is not None}
