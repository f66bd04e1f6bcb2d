"""Whether the calls of an answer are the expected ones. Pure; knows no file and no world.

A call is right when its name is, every expected argument has one of its allowed values, none is
missing that may not be left out, and none is there that wasn't expected.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from prorl_hpc.agents.tools import Call
from prorl_hpc.records import JSON

MAX_CALLS = 64
"""An answer with more calls is wrong; nobody counts how."""

LEFT_OUT = ""
"""Among the allowed values of published data sets: the argument may be left out."""

_NOISE = re.compile(r"[ ,./\-_*^'\"]")


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """One call that should be made."""

    name: str
    allowed: dict[str, list[JSON]]
    """Argument -> the values that it may have."""
    optional: list[str] = []
    """Arguments that may be left out."""
    nested: bool = False
    """Objects among the allowed values hold lists of allowed values themselves (BFCL's form)."""


def num_right(
    calls: Sequence[Call], expected: Sequence[Expected], *, ordered: bool, loose: bool
) -> int:
    """How many of the expected calls were made; each call stands for one of them at most."""
    if len(calls) > MAX_CALLS:
        return 0
    if ordered:
        pairs = zip(calls, expected, strict=False)
        return sum(is_right(call, wanted, loose=loose) for call, wanted in pairs)
    fits = [
        [i for i, call in enumerate(calls) if is_right(call, wanted, loose=loose)]
        for wanted in expected
    ]
    taken: dict[int, int] = {}
    return sum(_place(number, fits, taken, set()) for number in range(len(expected)))


def _place(number: int, fits: list[list[int]], taken: dict[int, int], tried: set[int]) -> bool:
    """Finds a call for one expected one, moving others to other calls (an augmenting path)."""
    for call in fits[number]:
        if call in tried:
            continue
        tried.add(call)
        if call not in taken or _place(taken[call], fits, taken, tried):
            taken[call] = number
            return True
    return False


def is_right(call: Call, expected: Expected, *, loose: bool) -> bool:
    """One call against one expected call."""
    if call.name != expected.name or not set(call.arguments) <= set(expected.allowed):
        return False
    return all(
        any(
            same_value(call.arguments[name], one, loose=loose, nested=expected.nested)
            for one in values
        )
        if name in call.arguments
        else name in expected.optional
        for name, values in expected.allowed.items()
    )


def same_value(found: Any, wanted: JSON, *, loose: bool, nested: bool) -> bool:
    """Goes no deeper than `wanted`. With `loose`, texts may differ in case, blanks and stops."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, int | float) and isinstance(wanted, int | float):
        return found == wanted
    if isinstance(found, str) and isinstance(wanted, str):
        return found == wanted or (loose and plain(found) == plain(wanted))
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(
            same_value(a, b, loose=loose, nested=nested) for a, b in zip(found, wanted, strict=True)
        )
    if isinstance(found, dict) and isinstance(wanted, dict):
        return _same_object(found, wanted, loose=loose, nested=nested)
    return found is None and wanted is None


def _same_object(
    found: Mapping[str, Any], wanted: Mapping[str, Any], *, loose: bool, nested: bool
) -> bool:
    if not set(found) <= set(wanted):
        return False
    for key, value in wanted.items():
        allowed = value if nested and isinstance(value, list) else [value]
        if key not in found:
            if not (nested and LEFT_OUT in allowed):
                return False
        elif not any(same_value(found[key], v, loose=loose, nested=nested) for v in allowed):
            return False
    return True


def plain(text: str) -> str:
    """A text without what people write in different ways."""
    return _NOISE.sub("", text).casefold()
