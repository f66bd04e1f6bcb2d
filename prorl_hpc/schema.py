"""Keys of the recipe: which exist, and which one a typing error meant. Reads types, no files."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from hpc.site import Site
from prorl_hpc.recipe import Recipe, RecipeError

FREE = object()
"""Anything goes below here."""


def check_key(key: str) -> None:
    """Raises RecipeError, with the nearest right key, when the schema has no `key`."""
    parts = key.split(".")
    here: Any = Recipe
    for depth, part in enumerate(parts):
        below = _child(here, part)
        if below is FREE:
            return
        if below is None:
            raise RecipeError(_unknown(key, ".".join(parts[:depth]), here))
        here = below


def check_keys(prefix: str, data: Mapping[str, Any]) -> None:
    """`check_key` for every key of nested data."""
    for name, value in data.items():
        key = f"{prefix}.{name}"
        check_key(key)
        if isinstance(value, Mapping) and _type_at(key) is not FREE:
            check_keys(key, value)


def known_keys() -> list[str]:
    """Every key of the schema; `*` stands for names that the user chooses."""
    return list(_keys(Recipe, ""))


def _type_at(key: str) -> Any:
    here: Any = Recipe
    for part in key.split("."):
        here = _child(here, part)
        if here is FREE or here is None:
            return here
    return here


def _child(annotation: Any, part: str) -> Any:
    """Type below `part`: None when there is none, FREE when anything may be."""
    if annotation is Any:
        return FREE
    if dataclasses.is_dataclass(annotation):
        return _fields(annotation).get(part)
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is dict:
        return FREE if arguments[1] in (Any, str) else arguments[1]
    return None


def _fields(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    found = {field.name: _plain(hints[field.name]) for field in dataclasses.fields(cls)}
    if cls is Recipe:
        found["site"] = Site
    return found


def _plain(annotation: Any) -> Any:
    """The type without None."""
    if isinstance(annotation, types.UnionType):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else annotation
    return annotation


def _keys(annotation: Any, prefix: str) -> Iterator[str]:
    if dataclasses.is_dataclass(annotation):
        for name, below in _fields(annotation).items():
            key = f"{prefix}{name}"
            yield key
            yield from _keys(below, f"{key}.")
    elif typing.get_origin(annotation) is dict and typing.get_args(annotation)[1] is not Any:
        yield from _keys(typing.get_args(annotation)[1], f"{prefix}*.")


def _unknown(key: str, parent: str, annotation: Any) -> str:
    last = key.rsplit(".", 1)[-1]
    names = list(_fields(annotation)) if dataclasses.is_dataclass(annotation) else []
    wrong = key[len(parent) + 1 :].split(".")[0] if parent else key.split(".")[0]
    near = difflib.get_close_matches(wrong, names, n=1) or [n for n in names if n.startswith(wrong)]
    close = [f"{parent}.{name}" if parent else name for name in near[:3]]
    if not close:
        tails = [known for known in known_keys() if known.rsplit(".", 1)[-1] == last]
        close = tails[:3] or difflib.get_close_matches(key, known_keys(), n=1)
    if close:
        return f"key {key!r} is unknown; did you mean {' or '.join(close)}?"
    listed = f"; {parent or 'a recipe'} has {', '.join(names)}" if names else ""
    return f"key {key!r} is unknown{listed}"
