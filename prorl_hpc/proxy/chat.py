"""A call to the model in neutral words, whatever API it came through. Pure; knows no JSON of any.

Tool calls are spelled into the text of an answer as the model writes them (`<tool_call>`), because
chat templates of that family take them so.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hpc.errors import HpcError
from prorl_hpc.agents.render import ToolSchema
from prorl_hpc.agents.tools import spell_call
from prorl_hpc.records import Message


class Refused(HpcError, ValueError):
    """A call that isn't answered; `status` is HTTP's, the rest is what the client is told."""

    def __init__(self, status: int, message: str, *, kind: str = "", code: str | None = None):
        super().__init__(message)
        self.status = status
        self.kind = kind or ("invalid_request_error" if status < 500 else "api_error")
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call that an answer makes."""

    name: str
    arguments: object
    """Decoded JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    text: str
    calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> Message:
        """As the chat template gets it."""
        spelled = [spell_call(call.name, call.arguments) for call in self.calls]
        return Message(role=self.role, content="\n".join([*filter(None, [self.text]), *spelled]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One call."""

    model: str
    """As the client named it; there is one model, whatever it is called."""
    turns: tuple[Turn, ...]
    tools: tuple[ToolSchema, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with the numbers of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the model said."""

    number: int
    """Of the call, in its episode."""
    text: str
    calls: tuple[ToolCall, ...]
    finish: str
    """`stop`, `length`, `tool_calls` or `stop_sequence`."""
    prompt_tokens: int
    completion_tokens: int
    stop_sequence: str | None = None

    @property
    def turn(self) -> Turn:
        """As a client will send it back."""
        return Turn(role="assistant", text=self.text, calls=self.calls)


def digest_tools(tools: Sequence[ToolSchema]) -> bytes:
    """Names a conversation's beginning: equal for equal tools."""
    encoded = msgspec.json.encode(tools, order="sorted")
    return hashlib.blake2b(encoded, digest_size=16).digest()


def digest_turn(before: bytes, turn: Turn) -> bytes:
    """Names a conversation up to and with `turn`, given the name of what came before.

    Clients strip answers, write JSON anew and rename calls; none of that makes another answer.
    """
    answer = turn.role == "assistant"
    text = turn.text.strip() if answer else turn.text
    calls = [(call.name, call.arguments) for call in turn.calls]
    encoded = msgspec.json.encode([turn.role, text, calls], order="sorted")
    return hashlib.blake2b(encoded, key=before, digest_size=16).digest()
