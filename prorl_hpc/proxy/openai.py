"""The OpenAI chat API in JSON: requests to neutral words, answers to JSON and events. No socket.

What a client sets and the recipe decides (temperature, top_p, seed, penalties) is read over: the
training distribution is the only one whose log-probabilities mean anything. What would change the
meaning of an answer and can't be done (several answers, forced tools, images, JSON modes) is
refused.
"""

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from prorl_hpc.agents.render import ToolSchema
from prorl_hpc.proxy.chat import Answer, Ask, Refused, ToolCall, Turn

ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool",
}  # fmt: skip
FINISH = {"stop_sequence": "stop"}
"""Where the API's word isn't ours."""

MODEL = "policy"


class Function(msgspec.Struct):
    """The function of a tool, or of a call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    arguments: str = ""


class Tool(msgspec.Struct):
    """A tool, or a call of one."""

    function: Function
    type: str = "function"


class Part(msgspec.Struct):
    """One piece of a message's content."""

    type: str
    text: str = ""


class ChatMessage(msgspec.Struct):
    """One message."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[Tool] | None = None


class StreamOptions(msgspec.Struct):
    """What a stream ends with."""

    include_usage: bool | None = None


class ChatRequest(msgspec.Struct):
    """The body of /v1/chat/completions; further fields are read over."""

    messages: list[ChatMessage]
    model: str = MODEL
    tools: list[Tool] | None = None
    tool_choice: Any = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    logprobs: bool | None = None
    response_format: dict[str, Any] | None = None


def decode(body: bytes, kind: type[Any]) -> Any:
    """A request's body. Raises Refused naming the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise Refused(400, f"the body can't be read: {err}") from err
    except RecursionError as err:
        raise Refused(400, "the body can't be read: it is nested too deeply") from err


def read_request(body: bytes) -> Ask:
    """Raises Refused for a body that isn't a request, or one that can't be met."""
    request: ChatRequest = decode(body, ChatRequest)
    choice = request.tool_choice
    if choice not in (None, "auto", "none"):
        raise Refused(400, "tool_choice: a call can't be forced by sampling; use auto or none")
    if request.n not in (None, 1):
        raise Refused(400, f"n={request.n}: one answer per call")
    if request.logprobs:
        raise Refused(400, "logprobs are kept for training and not told")
    if request.response_format and request.response_format.get("type") != "text":
        raise Refused(400, "response_format: only text")
    if not request.messages:
        raise Refused(400, "messages is empty")
    limit = request.max_completion_tokens or request.max_tokens
    return Ask(
        model=request.model,
        turns=tuple(_turn(place, one) for place, one in enumerate(request.messages)),
        tools=() if choice == "none" else tuple(map(_schema, request.tools or ())),
        max_tokens=check_limit("max_tokens", limit),
        stop=check_stop(request.stop),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
    )


def check_limit(name: str, limit: int | None) -> int | None:
    """Raises Refused for a number that can't be meant."""
    if limit is not None and limit < 1:
        raise Refused(400, f"{name}={limit} must be 1 or more")
    return limit


def check_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    """Raises Refused for too many or too long ones."""
    found = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(found) > 16 or any(len(one) > 1000 for one in found):
        raise Refused(400, "stop: at most 16 texts of at most 1000 letters")
    return found


def _turn(place: int, message: ChatMessage) -> Turn:
    role = ROLES.get(message.role)
    if role is None:
        known = ", ".join(ROLES)
        raise Refused(400, f"messages[{place}].role={message.role!r:.40} is unknown; use {known}")
    content = message.content
    if isinstance(content, list):
        wrong = next((part.type for part in content if part.type not in ("text", "refusal")), None)
        if wrong is not None:
            raise Refused(400, f"messages[{place}]: content of type {wrong!r:.40} can't be read")
        content = "".join(part.text for part in content)
    calls = tuple(_call(place, one.function) for one in message.tool_calls or ())
    if calls and role != "assistant":
        raise Refused(400, f"messages[{place}].tool_calls: only an assistant calls tools")
    return Turn(role=role, text=content or "", calls=calls)


def _call(place: int, function: Function) -> ToolCall:
    try:
        arguments = msgspec.json.decode(function.arguments or "{}")
    except (msgspec.MsgspecError, RecursionError) as err:
        raise Refused(400, f"messages[{place}].tool_calls: arguments aren't JSON") from err
    return ToolCall(name=function.name, arguments=arguments)


def _schema(tool: Tool) -> ToolSchema:
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


# --- answers -----------------------------------------------------------------------------------


def models() -> dict[str, Any]:
    """The body of /v1/models."""
    return {"object": "list", "data": [model(MODEL)]}


def model(name: str) -> dict[str, Any]:
    """The body of /v1/models/NAME."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "prorl-hpc"}


def body(ask: Ask, answer: Answer) -> dict[str, Any]:
    """The whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if answer.calls:
        message["tool_calls"] = _calls(answer)
    else:
        message["content"] = answer.text
    choice = {"index": 0, "message": message, "finish_reason": _finish(answer), "logprobs": None}
    return _frame(ask, answer.number, "chat.completion") | {
        "choices": [choice], "usage": _usage(answer)
    }  # fmt: skip


class Events:
    """One answer as server-sent events: pieces of its text, then the rest."""

    def __init__(self, ask: Ask, *, prompt_tokens: int) -> None:  # noqa: ARG002
        self._ask = ask
        self._told = ""
        self._frame: dict[str, Any] = {}

    def text(self, number: int, piece: str) -> Iterator[bytes]:
        """The next piece of call `number`'s text."""
        yield from self._begin(number)
        self._told += piece
        yield self._chunk({"content": piece})

    def end(self, answer: Answer) -> Iterator[bytes]:
        """What is still to be told, and the end."""
        yield from self._begin(answer.number)
        if rest := untold(answer, self._told):
            yield self._chunk({"content": rest})
        for index, call in enumerate(_calls(answer)):
            yield self._chunk({"tool_calls": [{"index": index} | call]})
        yield self._chunk({}, _finish(answer))
        if self._ask.include_usage:
            yield event(self._frame | {"choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def _begin(self, number: int) -> Iterator[bytes]:
        if not self._frame:
            self._frame = _frame(self._ask, number, "chat.completion.chunk")
            yield self._chunk({"role": "assistant", "content": ""})

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return event(self._frame | {"choices": [choice]})


def untold(answer: Answer, told: str) -> str:
    """The rest of an answer's text; none where it reads otherwise than what was told of it."""
    return answer.text.removeprefix(told) if answer.text.startswith(told) else ""


def problem(refused: Refused) -> dict[str, Any]:
    """The body of an error."""
    return {
        "error": {
            "message": str(refused), "type": refused.kind, "param": None, "code": refused.code
        }
    }  # fmt: skip


def event(data: dict[str, Any], *, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def _frame(ask: Ask, number: int, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": ask.model
    }  # fmt: skip


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{answer.number}_{index}",
            "type": "function",
            "function": {
                "name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()
            },
        }
        for index, call in enumerate(answer.calls)
    ]  # fmt: skip


def _finish(answer: Answer) -> str:
    return FINISH.get(answer.finish, answer.finish)


def _usage(answer: Answer) -> dict[str, int]:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
