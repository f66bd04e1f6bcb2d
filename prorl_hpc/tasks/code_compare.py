"""Whether what a program printed or returned is what its test expects. Pure.

Values come from `ast.literal_eval`, expected ones from JSON: lists and tuples are alike, sets stand
as `{"set": [...]}` and dictionaries of assertions as `{"items": [...]}`.
"""

import math
from collections.abc import Sequence

from prorl_hpc.records import JSON

RELATIVE = 1e-6
ABSOLUTE = 1e-9


def same_output(found: str, expected: str) -> bool:
    """Line by line and word by word, whatever the blanks; numbers with a point by value."""
    left, right = _words(found), _words(expected)
    if len(left) != len(right):
        return False
    return all(
        len(a) == len(b) and all(_same_word(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(left, right, strict=True)
    )


def same_value(found: object, expected: JSON) -> bool:
    """Deeply; truth values are no numbers, and floats may differ by rounding."""
    if isinstance(found, set | frozenset):
        wanted = expected.get("set") if isinstance(expected, dict) else None
        return isinstance(wanted, list) and _same_sequence(sorted(found, key=repr), wanted)
    if isinstance(found, dict):
        return _same_dict(found, expected)
    if isinstance(found, list | tuple):
        return isinstance(expected, list) and _same_sequence(found, expected)
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, int | float) and isinstance(expected, int | float):
        return _close(found, expected)
    return type(found) is type(expected) and found == expected


def _same_dict(found: dict[object, object], expected: JSON) -> bool:
    if not isinstance(expected, dict):
        return False
    items = expected.get("items")
    # JSON knows only texts as keys
    pairs = items if isinstance(items, list) else [[k, v] for k, v in expected.items()]
    if len(pairs) != len(found):
        return False
    rest = list(found.items())
    for key, value in pairs:
        for place, (k, v) in enumerate(rest):
            if (same_value(k, key) or str(k) == key) and same_value(v, value):
                del rest[place]
                break
        else:
            return False
    return True


def _same_sequence(found: Sequence[object], expected: Sequence[JSON]) -> bool:
    return len(found) == len(expected) and all(
        same_value(a, b) for a, b in zip(found, expected, strict=True)
    )


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.rstrip().splitlines()]


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if not any(mark in expected for mark in ".eE"):
        return False
    try:
        return _close(float(found), float(expected))
    except ValueError:
        return False


def _close(found: float, expected: float) -> bool:
    if isinstance(found, int) and isinstance(expected, int):
        return found == expected
    try:
        return math.isclose(found, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except OverflowError:
        return False
