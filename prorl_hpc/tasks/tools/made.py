"""Problems in simulated worlds, made from a seed. Pure; knows no agent and no conversation.

Options of a task of kind `tools` without `data`:

    worlds: all | [bank, calendar]
    level: 2 | [1, 3]        # 1 to 5: how much there is in a world
    wishes: 1 | [1, 3]       # so many things to do, in order; the last may be a question

What is expected is the state after the calls of one who knows everything, and for a question the
answer then. A wish that changes nothing is drawn again: doing nothing never earns a reward.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import msgspec

from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind
from prorl_hpc.tasks.base import TaskError
from prorl_hpc.tasks.cli.source import read_range
from prorl_hpc.tasks.tools.worlds import SETTINGS
from prorl_hpc.tasks.tools.worlds.base import Draw, Setting, Wish, World

OPTIONS = frozenset({"worlds", "level", "wishes", "questions"})

DEFAULT_TRAIN_SIZE = 100_000
VALIDATION_SHARE = 4
"""One problem in four belongs to validation."""

MAX_DRAWS = 128
MAX_WISH_DRAWS = 50
MOST_LEVEL, MOST_WISHES = 5, 5
QUESTIONS = 0.4
"""Share of the problems that end with a question."""

HEAD = "Do what is asked with the functions you have, then say in words that it is done."
ANSWER = "Give the answer to the question as <answer>...</answer>: the bare number or name."


class Made(msgspec.Struct, frozen=True, kw_only=True, tag="made"):
    """What an instance in a world is led and scored by."""

    world: str
    state: dict[str, Any]
    expected: dict[str, str]
    """The view of the world afterwards."""
    answer: str | None
    calls: list[tuple[str, dict[str, Any]]]
    """One way to get there."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeUp:
    """Problems by number."""

    name: str
    seed: int
    worlds: tuple[str, ...]
    levels: tuple[int, int]
    wishes: tuple[int, int]
    questions: float
    sizes: Mapping[Kind, int]

    def problem(self, index: int, *, kind: Kind) -> Made:
        """The same for the same recipe, always. Raises TaskError."""
        if not 0 <= index < self.sizes[kind]:
            raise IndexError(f"instance {index} of task {self.name} ({kind}: {self.sizes[kind]})")
        for draw in range(MAX_DRAWS):
            text = f"{self.seed}:{self.name}:{kind.value}:{index}:{draw}"
            rng = random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))
            made = make_problem(
                rng, world=self.worlds[index % len(self.worlds)], level=rng.randint(*self.levels),
                num_wishes=rng.randint(*self.wishes), questions=self.questions,
            )  # fmt: skip
            if made is not None and is_validation(made) == (kind is Kind.validation):
                return made
        raise TaskError(
            f"tasks.{self.name}: these worlds have too few distinct problems at this level to part "
            "training from validation; raise options.level"
        )


def make_problem(
    rng: random.Random, *, world: str, level: int, num_wishes: int, questions: float
) -> Made | None:
    """One problem; None where the world that was drawn has none of this size."""
    setting = SETTINGS[world]
    state = setting.fill(rng, level)
    played = setting.world(state)
    before = played.view()
    asks = rng.random() < questions
    wishes: list[Wish] = []
    for number in range(num_wishes):
        last = number == num_wishes - 1
        wish = _draw(rng, setting, played, setting.questions if asks and last else setting.errands)
        if wish is None:
            return None
        wishes.append(wish)
    answer, after = wishes[-1].answer, played.view()
    if answer is None and after == before:
        return None
    return Made(
        world=world, state=state, expected=after, answer=answer,
        calls=[call for wish in wishes for call in wish.calls], text=worded(wishes),
    )  # fmt: skip


def _draw(rng: random.Random, setting: Setting, world: World, pool: Sequence[Draw]) -> Wish | None:
    """A wish that can be done, and that changes something (or asks something); it is done."""
    for _ in range(MAX_WISH_DRAWS):
        wish = rng.choice(pool)(rng, world)
        if wish is None:
            continue
        trial = setting.world(world.state)
        for name, arguments in wish.calls:
            trial.do(name, arguments)
        if wish.answer is not None or trial.view() != world.view():
            world.state = trial.state
            return wish
    return None


def worded(wishes: Sequence[Wish]) -> str:
    """The prompt of some wishes."""
    if len(wishes) == 1:
        body = wishes[0].text
    else:
        lines = "\n".join(f"{number}. {wish.text}" for number, wish in enumerate(wishes, start=1))
        body = f"In this order:\n{lines}"
    tail = ANSWER if wishes[-1].answer is not None else ""
    return "\n\n".join(part for part in (body, f"{HEAD} {tail}".strip()) if part)


def is_validation(made: Made) -> bool:
    """By what is asked, and in which state of the world."""
    digest = hashlib.sha256(msgspec.json.encode([made.text, made.state])).digest()
    return int.from_bytes(digest[:4], "big") % VALIDATION_SHARE == 0


def read_made(name: str, config: TaskConfig, seed: int) -> MadeUp:
    """Raises TaskError."""
    options = config.options
    share = options.get("questions", QUESTIONS)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise TaskError(f"tasks.{name}.options.questions={share!r}; give a share from 0 to 1")
    return MadeUp(
        name=name,
        seed=seed,
        worlds=_worlds(name, options.get("worlds", "all")),
        levels=read_range(name, "level", options.get("level", 2), most=MOST_LEVEL),
        wishes=read_range(name, "wishes", options.get("wishes", 1), most=MOST_WISHES),
        questions=float(share),
        sizes={
            Kind.train: config.train_size or DEFAULT_TRAIN_SIZE,
            Kind.validation: config.validation_size,
        },
    )


def _worlds(name: str, wanted: object) -> tuple[str, ...]:
    if wanted == "all":
        return tuple(SETTINGS)
    chosen = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(chosen, list | tuple) or not chosen:
        raise TaskError(f"tasks.{name}.options.worlds={wanted!r}; give a list, or `all`")
    for world in chosen:
        if world not in SETTINGS:
            close = get_close_matches(str(world), SETTINGS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"choose of {', '.join(SETTINGS)}"
            raise TaskError(f"tasks.{name}.options.worlds: {world!r} is unknown; {hint}")
    return tuple(chosen)
