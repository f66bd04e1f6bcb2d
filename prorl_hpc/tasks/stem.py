r"""Questions with one right option, from JSON lines. Binary reward.

A line is `{"question", "options": [...], "answer"}`; the answer is a letter, a position (from 0)
or the option's own text. The model is asked for `\boxed{LETTER}`.
"""

import re
from string import ascii_uppercase
from typing import Any

from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import JSON, Outcome, Score
from prorl_hpc.tasks.answers import (
    after_thinking,
    boxed,
    prompt_messages,
    read_options,
    tagged,
)
from prorl_hpc.tasks.problems import Problem, ProblemTask, split_problems, text_of

PROMPT = "Think step by step, then give the letter of the right option as \\boxed{LETTER}."

_LETTER = re.compile(r"\(?\b([A-Z])\b\)?")
_STATED = re.compile(r"answer\s*(?:is|:)\s*\**\(?([A-Z])\b", re.IGNORECASE)


def make_stem(name: str, config: TaskConfig, seed: int) -> ProblemTask:  # noqa: ARG001
    """Raises TaskError."""
    read_options(name, config.options, {})
    problems = split_problems(name, config, decode=lambda row: _decode(row, config.system_prompt))
    return ProblemTask(name, problems, check=check, demonstrate=lambda a: f"\\boxed{{{a}}}")


def check(expected: JSON, response: str) -> Score:
    """1 for the right letter; `invalid` where no letter is given."""
    letter = letter_in(response)
    if letter is None:
        return Score(reward=0.0, outcome=Outcome.invalid)
    right = float(letter == expected)
    return Score(reward=right, components={"correct": right})


def letter_in(response: str) -> str | None:
    r"""The letter in `\boxed{}`, in `<answer>`, after "answer is", or standing alone."""
    text = after_thinking(response)
    for marked in (boxed(text), tagged(text)):
        if marked is not None:
            found = _LETTER.search(marked.upper())
            return found.group(1) if found else None
    stated = _STATED.findall(text)
    if stated:
        return str(stated[-1]).upper()
    alone = text.strip(" .()*")
    return alone.upper() if len(alone) == 1 and alone.isalpha() else None


def _decode(row: dict[str, Any], system_prompt: str | None) -> Problem:
    options = row["options"]
    if not isinstance(options, list) or not 2 <= len(options) <= len(ascii_uppercase):
        raise ValueError(f"options={options!r}; give a list of 2 to 26 texts")
    texts = [text_of(option, "options") for option in options]
    lines = [f"{letter}. {text}" for letter, text in zip(ascii_uppercase, texts, strict=False)]
    question = "\n".join([text_of(row["question"], "question"), "", *lines])
    return Problem(
        messages=prompt_messages(question, system_prompt=system_prompt, default=PROMPT),
        answer=_letter_of(row["answer"], texts),
        identity=str(row.get("id", "")),
    )


def _letter_of(answer: object, texts: list[str]) -> str:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        return ascii_uppercase[answer]
    if isinstance(answer, str):
        letter = answer.strip().upper()
        if len(letter) == 1 and letter in ascii_uppercase[: len(texts)]:
            return letter
        if answer in texts:
            return ascii_uppercase[texts.index(answer)]
    raise ValueError(f"answer={answer!r} is no letter, position or text of the options")
