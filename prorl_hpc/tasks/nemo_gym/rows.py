"""Rows of a NeMo Gym data set: prompt, tools and the verifier's own fields. Knows no server.

    {"responses_create_params": {"input": ..., "tools": [...]}, "agent_ref": {"name": ...}, ...}

A row goes to the server as it is. What can't be put before the policy token by token (images,
earlier function calls, tools that run at the model's provider) is refused, naming the line.
"""

from typing import Any

from prorl_hpc.agents.render import ToolSchema
from prorl_hpc.choices import AgentKind
from prorl_hpc.records import JSON
from prorl_hpc.tasks.problems import Problem, messages_of

_TEXTS = ("input_text", "output_text", "text")


def decode_row(row: dict[str, Any], *, agent: AgentKind, system_prompt: str | None) -> Problem:
    """Raises ValueError, KeyError or TypeError for a row that can't be a task here."""
    parameters = row["responses_create_params"]
    given = parameters["input"]
    for item in given if isinstance(given, list) else ():
        _check_item(item)
    if tools_of(row) and agent is not AgentKind.tools:
        raise ValueError("the row carries tools; set agent=tools and max_turns")
    instructions = parameters.get("instructions")
    system = instructions if isinstance(instructions, str) else system_prompt
    return Problem(
        messages=messages_of(row, key="input", system_prompt=system),
        answer=row,
        identity=_identity(row),
        metadata={"agent": agent_of(row)} if agent_of(row) else {},
    )


def tools_of(row: dict[str, Any]) -> tuple[ToolSchema, ...]:
    """The row's functions in the form that chat templates take. Raises ValueError."""
    tools = row["responses_create_params"].get("tools") or ()
    schemas = []
    for tool in tools:
        if not isinstance(tool, dict):
            raise ValueError(f"tool {tool!r:.40} isn't an object")
        if tool.get("type", "function") != "function":
            raise ValueError(f"tool of type {tool['type']!r} isn't supported; functions are")
        function = {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": tool.get("parameters") or {"type": "object", "properties": {}},
        }
        schemas.append({"type": "function", "function": function})
    return tuple(schemas)


def agent_of(row: dict[str, Any]) -> str:
    """Name of the agent (thus of the environment) that the row belongs to; empty: any."""
    reference = row.get("agent_ref")
    return str(reference.get("name", "")) if isinstance(reference, dict) else ""


def row_of(answer: JSON) -> dict[str, Any]:
    """An instance's row. Raises ValueError for an instance that has none."""
    if not isinstance(answer, dict) or not isinstance(answer.get("responses_create_params"), dict):
        raise ValueError("answer must be the Gym row, with responses_create_params")
    return answer


def _check_item(item: Any) -> None:
    if not isinstance(item, dict):
        raise ValueError(f"input item {item!r:.40} isn't a message")
    kind = item.get("type", "message")
    if kind != "message":
        raise ValueError(f"input item of type {kind!r} isn't supported; messages are")
    content = item["content"]
    for part in content if isinstance(content, list) else ():
        found = part.get("type") if isinstance(part, dict) else part
        if found not in _TEXTS:
            raise ValueError(f"input of type {found!r:.40} isn't supported; text is")


def _identity(row: dict[str, Any]) -> str:
    for key in ("uuid", "id", "instance_id"):
        if isinstance(row.get(key), str | int) and not isinstance(row.get(key), bool):
            return str(row[key])
    return ""
