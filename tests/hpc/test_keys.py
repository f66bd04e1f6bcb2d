"""Typing errors in keys of nested dataclasses: named, with the nearest right one."""

from dataclasses import dataclass, field

import pytest

from hpc.keys import unknown_key


@dataclass(kw_only=True, slots=True)
class Leaf:
    nodes: int = 1


@dataclass(kw_only=True, slots=True)
class Tree:
    leaf: Leaf = field(default_factory=Leaf)
    perhaps: Leaf | None = None
    by_name: dict[str, Leaf] = field(default_factory=dict)
    in_order: tuple[Leaf, ...] = ()
    free: dict[str, object] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ({"leav": {}}, "key 'leav' is unknown; did you mean leaf?"),
        ({"leaf": {"node": 1}}, "key 'leaf.node' is unknown; did you mean leaf.nodes?"),
        ({"perhaps": {"nods": 1}}, "did you mean perhaps.nodes?"),
        ({"by_name": {"a.b": {"nods": 1}}}, "key 'by_name.a.b.nods'"),
        ({"in_order": [{}, {"x": 1}]}, "key 'in_order.1.x' is unknown; in_order.1 has nodes"),
        ({1: 2}, "key '1' is unknown; the top has leaf, perhaps"),
    ],
)
def test_wrong_keys_are_named(data: object, wanted: str) -> None:
    found = unknown_key(data, Tree)
    assert found is not None
    assert wanted in found


@pytest.mark.parametrize(
    "data",
    [None, [], "text", {}, {"leaf": None}, {"leaf": {"nodes": "x"}}, {"free": {"any": {"k": 1}}}],
)
def test_the_rest_is_left_to_the_decoder(data: object) -> None:
    assert unknown_key(data, Tree) is None
