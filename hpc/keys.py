"""Keys of hand-edited files against the dataclass they are decoded into. Pure; knows no file.

Decoding ignores what it doesn't know, so that a typing error would silently leave a default.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def unknown_key(data: object, annotation: Any, *, path: str = "") -> str | None:
    """A sentence on the first key that `annotation` hasn't, with the nearest one it has.

    None when all are known. Values of a wrong type are left to the decoder.
    """
    annotation = _plain(annotation)
    if dataclasses.is_dataclass(annotation) and isinstance(data, Mapping):
        fields = _fields(annotation)
        for key in data:
            if key not in fields:
                return _sentence(key, tuple(fields), path)
    for key, value, below in _children(data, annotation):
        found = unknown_key(value, below, path=f"{path}.{key}" if path else key)
        if found is not None:
            return found
    return None


def _children(data: object, annotation: Any) -> Iterator[tuple[str, object, Any]]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(data, Mapping):
        if dataclasses.is_dataclass(annotation):
            fields = _fields(annotation)
            yield from ((key, value, fields[key]) for key, value in data.items())
        elif origin is dict:
            yield from ((str(key), value, arguments[1]) for key, value in data.items())
    elif origin in (list, tuple) and isinstance(data, Sequence) and not isinstance(data, str):
        yield from ((str(number), value, arguments[0]) for number, value in enumerate(data))


def _fields(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _plain(annotation: Any) -> Any:
    """The type without None."""
    if isinstance(annotation, types.UnionType):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else annotation
    return annotation


def _sentence(key: object, names: tuple[str, ...], path: str) -> str:
    """`key 'rollout.node' is unknown; did you mean rollout.nodes?`"""
    prefix = f"{path}." if path else ""
    close = difflib.get_close_matches(str(key), names, n=1) or [
        name for name in names if name.startswith(str(key))
    ]
    if close:
        return f"key {f'{prefix}{key}'!r} is unknown; did you mean {prefix}{close[0]}?"
    listed = ", ".join(names)
    return f"key {f'{prefix}{key}'!r} is unknown; {path or 'the top'} has {listed}"
