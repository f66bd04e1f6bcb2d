"""Where problems of the command line come from: a file of the user's, or the families made here.

Options of a task of kind `cli` without `data`:

    families: all | [find_files, sort_table]
    level: 2 | [1, 3]        # 1 to 5: how many files, how deep, how odd their names
    parts: 1 | [1, 2]        # so many problems in one, each in a directory of its own

Training and validation never share a problem: each belongs to one side by its own hash. Runs
nothing.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol

import msgspec

from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind
from prorl_hpc.tasks.answers import prompt_messages
from prorl_hpc.tasks.base import TaskError
from prorl_hpc.tasks.cli.made import FAMILIES, make_problem
from prorl_hpc.tasks.cli.problem import CliProblem, decode_row
from prorl_hpc.tasks.jsonl import Problem, split_problems
from prorl_hpc.tasks.sandboxes import OPTIONS as SANDBOX_OPTIONS

MADE_OPTIONS = frozenset({"families", "level", "parts"})
OPTIONS = SANDBOX_OPTIONS | MADE_OPTIONS | {"reward", "replay"}

DEFAULT_TRAIN_SIZE = 100_000
VALIDATION_SHARE = 4
"""One problem in four belongs to validation."""

MAX_DRAWS = 128
MOST_LEVEL, MOST_PARTS = 5, 4


class Source(Protocol):
    """Problems by number."""

    def size(self, kind: Kind) -> int: ...

    def problem(self, index: int, *, kind: Kind) -> CliProblem: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """The problems of a file."""

    problems: Mapping[Kind, Sequence[CliProblem]]

    def size(self, kind: Kind) -> int:
        return len(self.problems[kind])

    def problem(self, index: int, *, kind: Kind) -> CliProblem:
        return self.problems[kind][index]


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeUp:
    """Problems made from their number."""

    name: str
    seed: int
    families: tuple[str, ...]
    levels: tuple[int, int]
    parts: tuple[int, int]
    sizes: Mapping[Kind, int]

    def size(self, kind: Kind) -> int:
        return self.sizes[kind]

    def problem(self, index: int, *, kind: Kind) -> CliProblem:
        """The same for the same recipe, always. Raises TaskError."""
        if not 0 <= index < self.size(kind):
            raise IndexError(f"instance {index} of task {self.name} ({kind}: {self.size(kind)})")
        for draw in range(MAX_DRAWS):
            text = f"{self.seed}:{self.name}:{kind.value}:{index}:{draw}"
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
            problem = make_problem(
                seed, families=self.families, first=index, levels=self.levels, parts=self.parts
            )
            if is_validation(problem) == (kind is Kind.validation):
                family = problem.id
                return msgspec.structs.replace(problem, id=f"{family}-{kind.value}-{index}")
        raise TaskError(
            f"tasks.{self.name}: these families have too few distinct problems at this level to "
            "part training from validation; raise options.level or add families"
        )


def is_validation(problem: CliProblem) -> bool:
    """By what the agent is told and finds."""
    seen = msgspec.json.encode([problem.instruction, problem.files])
    digest = hashlib.sha256(seen).digest()
    return int.from_bytes(digest[:4], "big") % VALIDATION_SHARE == 0


def read_source(name: str, config: TaskConfig, seed: int) -> Source:
    """Raises TaskError."""
    options = config.options
    if config.data is not None:
        given = sorted(MADE_OPTIONS & set(options))
        if given:
            raise TaskError(
                f"tasks.{name}.options.{given[0]} is for problems that are made, but "
                f"data={config.data!r}; drop one"
            )
        split = split_problems(name, config, decode=_decode)
        return Listed(problems={kind: [one.answer for one in side] for kind, side in split.items()})
    return MadeUp(
        name=name,
        seed=seed,
        families=_families(name, options.get("families", "all")),
        levels=read_range(name, "level", options.get("level", 2), most=MOST_LEVEL),
        parts=read_range(name, "parts", options.get("parts", 1), most=MOST_PARTS),
        sizes={
            Kind.train: config.train_size or DEFAULT_TRAIN_SIZE,
            Kind.validation: config.validation_size,
        },
    )


def _decode(row: dict[str, Any]) -> Problem:
    problem = decode_row(row)
    # what is the same for the agent is one problem, whatever is checked
    seen = msgspec.json.encode([problem.instruction, problem.files, problem.setup]).decode()
    return Problem(messages=prompt_messages(seen, system_prompt=None), answer=problem)


def _families(name: str, wanted: object) -> tuple[str, ...]:
    if wanted == "all":
        return tuple(FAMILIES)
    chosen = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(chosen, list | tuple) or not chosen:
        raise TaskError(f"tasks.{name}.options.families={wanted!r}; give a list, or `all`")
    for family in chosen:
        if family not in FAMILIES:
            close = get_close_matches(str(family), FAMILIES, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"choose of {', '.join(FAMILIES)}"
            raise TaskError(f"tasks.{name}.options.families: {family!r} is unknown; {hint}")
    return tuple(chosen)


def read_range(name: str, key: str, given: object, *, most: int) -> tuple[int, int]:
    """A whole number from 1 to `most`, or a list of two. Raises TaskError."""
    pair = [given, given] if isinstance(given, int) else given
    if isinstance(pair, list | tuple) and len(pair) == 2:
        low, high = pair
        whole = all(isinstance(one, int) and not isinstance(one, bool) for one in pair)
        if whole and 1 <= low <= high <= most:
            return (low, high)
    raise TaskError(
        f"tasks.{name}.options.{key}={given!r}; give a number from 1 to {most}, or two: [1, {most}]"
    )
