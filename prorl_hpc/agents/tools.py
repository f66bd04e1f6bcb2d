"""The agent that calls tools: JSON in <tool_call> tags, the form of Hermes and Qwen templates.

Tools are declared to the chat template and their results come back under the role `tool`. Knows
the two tools of a shell; knows neither sandbox nor task.
"""

from collections.abc import Sequence

import msgspec

from prorl_hpc.agents.bash import COMMAND_SECONDS, show
from prorl_hpc.agents.episode import Conversation
from prorl_hpc.agents.render import ObservationRenderer, ToolSchema
from prorl_hpc.agents.spans import enclosed
from prorl_hpc.environment.base import Environment
from prorl_hpc.records import Message


def _schema(name: str, description: str, **properties: str) -> ToolSchema:
    parameters = {
        "type": "object",
        "properties": {
            key: {"type": "string", "description": text} for key, text in properties.items()
        },
        "required": list(properties),
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS: tuple[ToolSchema, ...] = (
    _schema(
        "bash",
        "Runs a command in a shell whose directory and variables persist; returns its output.",
        command="The command, or several lines of them.",
    ),
    _schema("submit", "Ends the work and hands it in."),
)

NO_CALL = "Your answer calls no tool. Call `bash` with a command, or `submit` when you are done."

CALL_TAG = "<tool_call>"
"""What begins a call."""

CALL_END = "</tool_call>"


class Call(msgspec.Struct, frozen=True):
    """One tool call as the model wrote it."""

    name: str
    arguments: dict[str, object] = {}


class Tools:
    """A loop of calls and results."""

    needs_environment = True

    def __init__(
        self, render: ObservationRenderer, *, command_seconds: float = COMMAND_SECONDS
    ) -> None:
        self._render = render
        self._command_seconds = command_seconds

    async def run(
        self,
        conversation: Conversation,
        *,
        messages: Sequence[Message],
        environment: Environment | None,
    ) -> None:
        """Until `submit`, or a limit of the conversation. Calls of one answer run in order."""
        assert environment is not None, "the tools agent needs an environment"
        conversation.begin(messages, tools=TOOLS)
        while not conversation.over:
            calls = calls_in(await conversation.answer())
            if conversation.over:
                return
            results = []
            for call in calls:
                if isinstance(call, Call) and call.name == "submit":
                    return
                results.append(await self._result(call, environment))
            conversation.observe(results or [NO_CALL], render=self._render)

    async def _result(self, call: Call | str, environment: Environment) -> str:
        if isinstance(call, str):
            return f"This call can't be read: {call}"
        command = call.arguments.get("command")
        if call.name != "bash":
            return f"There is no tool {call.name!r}; the tools are bash and submit."
        if not isinstance(command, str) or not command.strip():
            return "The tool bash needs the argument `command`, a text that isn't empty."
        return show(await environment.run(command, self._command_seconds))


def calls_in(text: str) -> list[Call | str]:
    """The calls of an answer; a text in place of one that can't be read says why."""
    calls: list[Call | str] = []
    for start, end in enclosed(text, opening=CALL_TAG, closing=CALL_END):
        try:
            calls.append(msgspec.json.decode(text[start:end].encode(), type=Call))
        except (msgspec.MsgspecError, RecursionError) as err:
            calls.append(str(err))
    return calls


def split_answer(text: str) -> tuple[str, list[Call]]:
    """What an answer says beside its calls, and the calls; one that can't be read stays text."""
    calls: list[Call] = []
    said: list[str] = []
    done = 0
    for start, end in enclosed(text, opening=CALL_TAG, closing=CALL_END):
        try:
            calls.append(msgspec.json.decode(text[start:end].encode(), type=Call))
        except (msgspec.MsgspecError, RecursionError):
            continue
        said.append(text[done : start - len(CALL_TAG)])
        done = end + len(CALL_END)
    return "".join([*said, text[done:]]).strip(), calls


def spell_call(name: str, arguments: object) -> str:
    """A call as the model would write it."""
    body = msgspec.json.encode({"name": name, "arguments": arguments}).decode()
    return f"{CALL_TAG}\n{body}\n{CALL_END}"
