"""The Anthropic messages API in JSON: requests to neutral words, answers to JSON and events.

Thinking blocks that a client sends back are left out; the rest is as in `prorl_hpc.proxy.openai`.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from prorl_hpc.agents.render import ToolSchema
from prorl_hpc.proxy.chat import Answer, Ask, Refused, ToolCall, Turn
from prorl_hpc.proxy.openai import MODEL, check_limit, check_stop, decode, event, untold

FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
KINDS = {403: "permission_error", 404: "not_found_error", 413: "request_too_large",
         429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip
SILENT = ("thinking", "redacted_thinking")


class Block(msgspec.Struct):
    """One block of a message's content."""

    type: str
    text: str = ""
    name: str = ""
    input: Any = None
    content: "str | list[Block] | None" = None


class InMessage(msgspec.Struct):
    """One message."""

    role: str
    content: str | list[Block]


class AnthropicTool(msgspec.Struct):
    """A tool."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct):
    """Whether tools are to be called."""

    type: str = "auto"


class MessagesRequest(msgspec.Struct):
    """The body of /v1/messages; further fields are read over."""

    messages: list[InMessage]
    model: str = MODEL
    system: str | list[Block] | None = None
    max_tokens: int | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def read_request(body: bytes) -> Ask:
    """Raises Refused for a body that isn't a request, or one that can't be met."""
    request: MessagesRequest = decode(body, MessagesRequest)
    choice = request.tool_choice.type if request.tool_choice else "auto"
    if choice not in ("auto", "none"):
        raise Refused(400, "tool_choice: a call can't be forced by sampling; use auto or none")
    if not request.messages:
        raise Refused(400, "messages is empty")
    turns: list[Turn] = []
    if request.system:
        turns.append(Turn(role="system", text=_text("system", request.system)))
    for place, message in enumerate(request.messages):
        turns += _turns(f"messages[{place}]", message)
    return Ask(
        model=request.model,
        turns=tuple(turns),
        tools=() if choice == "none" else tuple(map(_schema, request.tools or ())),
        max_tokens=check_limit("max_tokens", request.max_tokens),
        stop=check_stop(request.stop_sequences),
        stream=bool(request.stream),
    )


def _turns(where: str, message: InMessage) -> list[Turn]:
    """A user's message may hold results of tools: they come first, as messages of their own."""
    if message.role not in ("user", "assistant"):
        raise Refused(400, f"{where}.role={message.role!r:.40} is unknown; use user or assistant")
    blocks = message.content
    if isinstance(blocks, str):
        return [Turn(role=message.role, text=blocks)]
    texts: list[str] = []
    calls: list[ToolCall] = []
    results: list[Turn] = []
    for block in blocks:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "tool_use" and message.role == "assistant":
            calls.append(ToolCall(name=block.name, arguments=block.input or {}))
        elif block.type == "tool_result" and message.role == "user":
            results.append(Turn(role="tool", text=_text(where, block.content or "")))
        elif block.type not in SILENT:
            raise Refused(400, f"{where}: a block of type {block.type!r:.40} can't be read here")
    if not texts and results:
        return results
    return [*results, Turn(role=message.role, text="\n".join(texts), calls=tuple(calls))]


def _text(where: str, content: str | list[Block]) -> str:
    if isinstance(content, str):
        return content
    wrong = next((block.type for block in content if block.type != "text"), None)
    if wrong is not None:
        raise Refused(400, f"{where}: a block of type {wrong!r:.40} can't be read here")
    return "\n".join(block.text for block in content)


def _schema(tool: AnthropicTool) -> ToolSchema:
    if tool.type not in (None, "custom"):
        raise Refused(400, f"tools: type {tool.type!r:.40} is run by nobody here; declare your own")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


# --- answers -----------------------------------------------------------------------------------


def body(ask: Ask, answer: Answer) -> dict[str, Any]:
    """The whole answer."""
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens}
    return _frame(ask, answer.number) | {
        "content": _blocks(answer),
        "stop_reason": FINISH.get(answer.finish, answer.finish),
        "stop_sequence": answer.stop_sequence,
        "usage": usage,
    }


class Events:
    """One answer as server-sent events: pieces of its text, then the rest."""

    def __init__(self, ask: Ask, *, prompt_tokens: int) -> None:
        self._ask = ask
        self._prompt_tokens = prompt_tokens
        self._begun = False
        self._told = ""

    def text(self, number: int, piece: str) -> Iterator[bytes]:
        """The next piece of call `number`'s text."""
        yield from self._begin(number)
        if not self._told:
            yield _open(0, {"type": "text", "text": ""})
        self._told += piece
        yield _delta(0, {"type": "text_delta", "text": piece})

    def end(self, answer: Answer) -> Iterator[bytes]:
        """What is still to be told, and the end."""
        yield from self._begin(answer.number)
        first = 0
        if answer.text or self._told or not answer.calls:
            if not self._told:
                yield _open(0, {"type": "text", "text": ""})
            if (rest := untold(answer, self._told)) or not self._told:
                yield _delta(0, {"type": "text_delta", "text": rest})
            yield _told("content_block_stop", index=0)
            first = 1
        for index, block in enumerate(_tool_blocks(answer), start=first):
            yield _open(index, block | {"input": {}})
            written = msgspec.json.encode(block["input"]).decode()
            yield _delta(index, {"type": "input_json_delta", "partial_json": written})
            yield _told("content_block_stop", index=index)
        ending = {
            "stop_reason": FINISH.get(answer.finish, answer.finish),
            "stop_sequence": answer.stop_sequence,
        }
        usage = {"output_tokens": answer.completion_tokens}
        yield _told("message_delta", delta=ending, usage=usage)
        yield _told("message_stop")

    def _begin(self, number: int) -> Iterator[bytes]:
        if self._begun:
            return
        self._begun = True
        start: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._prompt_tokens, "output_tokens": 0},
        }
        yield _told("message_start", message=_frame(self._ask, number) | start)


def _told(kind: str, **fields: Any) -> bytes:
    return event({"type": kind} | fields, name=kind)


def _open(index: int, block: dict[str, Any]) -> bytes:
    return _told("content_block_start", index=index, content_block=block)


def _delta(index: int, delta: dict[str, Any]) -> bytes:
    return _told("content_block_delta", index=index, delta=delta)


def problem(refused: Refused) -> dict[str, Any]:
    """The body of an error."""
    kind = KINDS.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


def _frame(ask: Ask, number: int) -> dict[str, Any]:
    return {
        "id": f"msg_{number}", "type": "message", "role": "assistant", "model": ask.model
    }  # fmt: skip


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        blocks.append({"type": "text", "text": answer.text})
    return blocks + _tool_blocks(answer)


def _tool_blocks(answer: Answer) -> list[dict[str, Any]]:
    return [
        {
            "type": "tool_use",
            "id": f"toolu_{answer.number}_{index}",
            "name": call.name,
            "input": call.arguments,
        }
        for index, call in enumerate(answer.calls)
    ]
