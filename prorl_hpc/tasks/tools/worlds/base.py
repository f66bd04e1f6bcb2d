"""What a simulated world is: functions with schemas over a state, and views that are compared.

    state (plain data) ─► call(name, arguments) ─► result, or a complaint that can be acted on
                     └──► view(): path -> value, without what is only numbering

Deterministic: equal states and equal calls give equal results. Whatever the arguments are, a call
ends in a result or a complaint. Knows no agent and no score.
"""

import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from prorl_hpc.agents.render import ToolSchema
from prorl_hpc.records import JSON
from prorl_hpc.tasks.cli.dice import words
from prorl_hpc.tasks.tools.schemas import complaint, shown

State = dict[str, Any]
Call = tuple[str, dict[str, Any]]
"""(function, arguments)."""

Method = Callable[..., JSON]


class Mistake(Exception):
    """What the caller got wrong; the words are what the caller is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """Something to be done or found out in a world as it stands."""

    text: str
    calls: tuple[Call, ...] = ()
    """What a caller who knows the whole state would call."""
    answer: str | None = None
    """What is to be answered; None: nothing."""


Draw = Callable[[random.Random, "World"], Wish | None]
"""A wish that suits the world's state; None where this one doesn't."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A world, how it is filled, and what can be wished in it."""

    world: type["World"]
    fill: Callable[[random.Random, int], State]
    """(randomness, level from 1 to 5) -> a state."""
    errands: Sequence[Draw]
    """Wishes that change the state."""
    questions: Sequence[Draw]
    """Wishes for an answer."""


def function(description: str, **arguments: dict[str, Any]) -> Callable[[Method], Method]:
    """Makes a method a function of its world; one whose schema says `optional` may be absent."""
    required = [name for name, schema in arguments.items() if not schema.get("optional")]
    plain = {
        name: {key: value for key, value in schema.items() if key != "optional"}
        for name, schema in arguments.items()
    }

    def mark(method: Method) -> Method:
        schema: ToolSchema = {
            "type": "function",
            "function": {
                "name": method.__name__,
                "description": description,
                "parameters": {"type": "object", "properties": plain, "required": required},
            },
        }
        method.tool_schema = schema  # type: ignore[attr-defined]
        return method

    return mark


def text(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **more}


def whole(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "integer", "description": description, **more}


class World:
    """Subclasses have methods marked by `function`."""

    schemas: ClassVar[Mapping[str, ToolSchema]] = {}

    def __init_subclass__(cls) -> None:
        found = {name: getattr(method, "tool_schema", None) for name, method in vars(cls).items()}
        cls.schemas = {name: schema for name, schema in found.items() if schema is not None}

    def __init__(self, state: State) -> None:
        """The state is the world's own from here on."""
        self.state = copy.deepcopy(state)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """JSON of the result, or of `{"error": ...}`. Never raises for what it is given."""
        try:
            result = self.do(name, arguments)
        except Mistake as err:
            result = {"error": str(err)}
        return json.dumps(result)

    def do(self, name: str, arguments: Mapping[str, Any]) -> JSON:
        """The result. Raises Mistake."""
        schema = self.schemas.get(name)
        if schema is None:
            raise Mistake(
                f"there is no function {shown(name)}; there are {', '.join(self.schemas)}"
            )
        wrong = complaint(arguments, schema["function"]["parameters"])
        if wrong is not None:
            raise Mistake(wrong)
        return getattr(self, name)(**arguments)

    def view(self) -> dict[str, str]:
        """What is compared: path -> value as JSON. New things go by content, not by number."""
        raise NotImplementedError

    def next_id(self, letter: str) -> str:
        """A name for something new."""
        self.state["made"] += 1
        return f"{letter}-new-{self.state['made']}"


def flat(kind: str, things: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The fields of things by their names; of new ones (`-new-`) how many are alike."""
    made: dict[str, int] = {}
    view: dict[str, str] = {}
    for name, thing in things.items():
        if "-new-" in name:
            content = json.dumps(thing, sort_keys=True)
            made[content] = made.get(content, 0) + 1
            continue
        for field, value in thing.items():
            view[f"{kind}/{name}/{field}"] = json.dumps(value, sort_keys=True)
    return view | {f"{kind}/new/{content}": str(count) for content, count in made.items()}


def known(things: Mapping[str, Any], name: str, what: str) -> Any:
    """One of `things`. Raises Mistake."""
    if name not in things:
        raise Mistake(f"there is no {what} {shown(name)}")
    return things[name]


def money(cents: int) -> str:
    """An amount as wishes write it."""
    return f"{cents // 100}.{cents % 100:02}"


FIRST = words("""
Ada Ben Clara Dan Eva Finn Gina Hugo Ida Jon Kira Leo Mia Nora Otto Paula Quinn Rosa Sam Tina
Uma Vera Will Xena Yann Zoe
""")
LAST = words("""
Adler Becker Costa Diaz Ek Fischer Garcia Holm Ito Jansen Kim Lopez Moreau Novak Okoye Park
Quist Rossi Silva Tanaka Usman Vogel Weber Yilmaz Zhang
""")


def people(rng: random.Random, count: int) -> list[str]:
    """Distinct full names."""
    pairs = [f"{first} {last}" for first in FIRST for last in LAST]
    return rng.sample(pairs, count)
