"""Data sets of a user: read once, split into training and validation. Knows no verifier.

Where no validation file is given, `validation_size` problems are set apart by the hash of their
text, so that the split doesn't depend on the order of lines and no problem is on both sides.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import JSON, Instance, Kind, Message, Outcome, Score
from prorl_hpc.tasks.answers import prompt_messages
from prorl_hpc.tasks.base import TaskError
from prorl_hpc.tasks.rows import read_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One line of a data set, or one problem that was made."""

    messages: tuple[Message, ...]
    answer: JSON
    identity: str = ""
    """The data set's own name for it; empty: its number."""
    metadata: dict[str, JSON] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        text = "\0".join(m.content for m in self.messages if m.role != "system")
        return hashlib.sha256(text.encode()).hexdigest()


Decode = Callable[[dict[str, Any]], Problem]
"""A decoded row -> a problem. Raises ValueError, KeyError or TypeError for a bad one."""

Check = Callable[[JSON, str], Score]
"""(the problem's answer, the response) -> its score."""


def read_problems(name: str, path: str, *, decode: Decode) -> list[Problem]:
    """All problems of a file. Raises TaskError naming the line that is wrong."""
    problems = []
    for where, row in read_rows(name, Path(path)):
        try:
            problems.append(decode(row))
        except KeyError as err:
            raise TaskError(f"tasks.{name}: {path} {where} has no field {err}") from err
        except (ValueError, TypeError) as err:
            raise TaskError(f"tasks.{name}: {path} {where}: {err}") from err
    if not problems:
        raise TaskError(f"tasks.{name}.data={path!r} holds no problem")
    return problems


def split_problems(
    name: str, config: TaskConfig, *, decode: Decode
) -> dict[Kind, Sequence[Problem]]:
    """The two sides of a recipe's data; all is validation where the task isn't trained (weight 0).

    Raises TaskError.
    """
    if config.data is None:
        raise TaskError(f"tasks.{name}.data is missing; give a file of JSON lines or Parquet")
    problems = read_problems(name, config.data, decode=decode)
    if config.validation_data is not None:
        held = read_problems(name, config.validation_data, decode=decode)[: config.validation_size]
    elif config.weight == 0:
        return {Kind.train: [], Kind.validation: problems[: config.validation_size]}
    else:
        digests = sorted({p.digest for p in problems})
        if len(digests) <= config.validation_size:
            raise TaskError(
                f"tasks.{name}.validation_size={config.validation_size} leaves nothing to train "
                f"of {len(digests)} distinct problems; lower it or give validation_data"
            )
        chosen = set(digests[: config.validation_size])
        held = list({p.digest: p for p in problems if p.digest in chosen}.values())
    apart = {p.digest for p in held}
    train = [p for p in problems if p.digest not in apart][: config.train_size]
    if not train:
        raise TaskError(f"tasks.{name}: every training problem is in validation_data as well")
    return {Kind.train: train, Kind.validation: held}


class ProblemTask:
    """A task over a fixed list of problems and a rule that checks answers."""

    def __init__(
        self, name: str, problems: dict[Kind, Sequence[Problem]], *, check: Check,
        demonstrate: Callable[[JSON], str | None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.name = name
        self._problems = problems
        self._check = check
        self._demonstrate = demonstrate

    def size(self, kind: Kind) -> int:
        return len(self._problems[kind])

    def instance(self, index: int, *, kind: Kind) -> Instance:
        problem = self._problems[kind][index]
        return Instance(
            task=self.name,
            instance_id=problem.identity or f"{self.name}-{kind.value}-{index}",
            index=index,
            messages=problem.messages,
            answer=problem.answer,
            metadata=problem.metadata,
        )

    def score(self, instance: Instance, response: str) -> Score:
        if not response.strip():
            return Score(reward=0.0, outcome=Outcome.invalid)
        return self._check(instance.answer, response)

    def demonstration(self, instance: Instance) -> str | None:
        """What a right answer looks like, where the task knows one."""
        return self._demonstrate(instance.answer)


def messages_of(row: dict[str, Any], *, key: str, system_prompt: str | None) -> tuple[Message, ...]:
    """The prompt of a line: NeMo Gym's `responses_create_params.input`, or the text under `key`."""
    parameters = row.get("responses_create_params")
    if parameters is None:
        return prompt_messages(text_of(row[key], key), system_prompt=system_prompt)
    given = parameters["input"]
    if isinstance(given, str):
        return prompt_messages(given, system_prompt=system_prompt)
    messages = tuple(_message(part) for part in given)
    if not messages:
        raise ValueError("responses_create_params.input is empty")
    if system_prompt is None or any(m.role == "system" for m in messages):
        return messages
    return (Message(role="system", content=system_prompt), *messages)


def text_of(value: object, key: str) -> str:
    """A text that isn't empty; numbers count as text."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{key}={value!r} isn't a text")
    if not str(value).strip():
        raise ValueError(f"{key} is empty")
    return str(value)


def _message(part: dict[str, Any]) -> Message:
    content = part["content"]
    if not isinstance(content, str):
        content = "".join(piece["text"] for piece in content)
    role = "system" if part["role"] == "developer" else part["role"]
    return Message(role=role, content=content)
