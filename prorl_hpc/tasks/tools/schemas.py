"""Whether the arguments of a call fit what a function declares, and in words what doesn't. Pure.

Of JSON Schema these words count: type, properties, required, items, minItems, enum, minimum,
maximum.
"""

from collections.abc import Mapping
from typing import Any

TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}

OTHER_NAMES = {
    "dict": "object", "list": "array", "tuple": "array", "float": "number", "double": "number",
    "int": "integer", "long": "integer", "str": "string", "char": "string", "bool": "boolean",
}  # fmt: skip
"""Python's and others' words for types, as published data sets have them."""

SHOWN = 60
"""Characters of a wrong value that a complaint repeats."""


def complaint(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str | None:
    """The first thing that is wrong, as the policy is told; None when all is well."""
    return _object(arguments, parameters, where="")


def _object(value: Mapping[str, Any], schema: Mapping[str, Any], *, where: str) -> str | None:
    known = schema.get("properties", {})
    for key in schema.get("required", ()):
        if key not in value:
            return f"argument {where}{key!r} is missing"
    for key, inside in value.items():
        if key not in known:
            return (
                f"there is no argument {where}{shown(key)}; known are {', '.join(known) or 'none'}"
            )
        wrong = _value(inside, known[key], where=f"{where}{key}")
        if wrong is not None:
            return wrong
    return None


def _value(value: Any, schema: Mapping[str, Any], *, where: str) -> str | None:
    name = schema.get("type")
    if isinstance(name, str) and not is_type(value, name):
        return f"argument {where!r} must be {name}, not {shown(value)}"
    options = schema.get("enum")
    if options is not None and value not in options:
        return f"argument {where!r} is {shown(value)}; choose of {', '.join(map(str, options))}"
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            return f"argument {where!r} needs {schema['minItems']} items at least"
        inside = schema.get("items", {})
        found = (_value(v, inside, where=f"{where}[{i}]") for i, v in enumerate(value))
        return next((wrong for wrong in found if wrong is not None), None)
    if isinstance(value, dict):
        return _object(value, schema, where=f"{where}.")
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum"), schema.get("maximum")
        if (low is not None and value < low) or (high is not None and value > high):
            return f"argument {where!r} is {shown(value)}; it must be in [{low}, {high}]"
    return None


def is_type(value: Any, name: str) -> bool:
    """Whether a decoded value is of a JSON type; true is no number, and 2.0 is an integer."""
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[name])


def shown(value: object) -> str:
    """A value as complaints repeat it: short, whatever it is."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # too deep, or a number of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
