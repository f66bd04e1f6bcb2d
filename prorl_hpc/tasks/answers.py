"""Where the answer stands in a model's text. Pure functions on text; knows no task.

A reasoning model thinks first: what stands before the last `</think>` is never an answer.
"""

import json
import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from prorl_hpc.agents.spans import enclosed
from prorl_hpc.records import Message
from prorl_hpc.tasks.base import TaskError

ANSWER_PROMPT = "Think as long as you need, then give your final answer as <answer>...</answer>."
"""Added as system prompt where tags are demanded and the recipe has none of its own."""


def after_thinking(text: str) -> str:
    """The text behind the last `</think>`; empty while the model is still thinking."""
    if "</think>" in text:
        return text.rpartition("</think>")[2].strip()
    return "" if "<think>" in text else text.strip()


def tagged(text: str) -> str | None:
    """The content of the last `<answer>` pair, or None."""
    found = list(enclosed(text, opening="<answer>", closing="</answer>"))
    return text[slice(*found[-1])].strip() if found else None


def boxed(text: str) -> str | None:
    r"""The content of the last balanced `\boxed{...}`, or None."""
    unclosed: list[int] = []
    last: tuple[int, int] | None = None
    for brace in re.finditer(r"[{}]", text):
        if brace.group() == "{":
            unclosed.append(brace.end())
        elif unclosed:
            start = unclosed.pop()
            if text.endswith("\\boxed", 0, start - 1) and (last is None or start > last[0]):
                last = start, brace.start()
    return text[slice(*last)].strip() if last is not None else None


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for what isn't JSON, `NaN` and 1e999 included."""
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError as err:
        raise ValueError("nested too deeply") from err


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def prompt_messages(
    question: str, *, system_prompt: str | None, default: str | None = None
) -> tuple[Message, ...]:
    """The recipe's system prompt (else the task's own, if any) and the question."""
    system = default if system_prompt is None else system_prompt
    head = (Message(role="system", content=system),) if system else ()
    return (*head, Message(role="user", content=question))


def read_options(
    name: str, options: Mapping[str, Any], known: Mapping[str, type]
) -> dict[str, Any]:
    """Checks the keys and types of `tasks.<name>.options`; raises TaskError with did-you-mean."""
    for key, value in options.items():
        if key not in known:
            close = get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"choose of {', '.join(known)}"
            raise TaskError(f"tasks.{name}.options.{key} is unknown; {hint}")
        if known[key] is not object and not isinstance(value, known[key]):
            raise TaskError(f"tasks.{name}.options.{key}={value!r} must be {known[key].__name__}")
    return dict(options)
