"""Following instructions that rules can check, from JSON lines. Reward: the fraction kept.

A line is `{"prompt", "instruction_id_list": [...], "kwargs": [{...}, ...]}`, the form of IFEval.
Scored is what stands behind `</think>`.
"""

from difflib import get_close_matches
from typing import Any

from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import JSON, Outcome, Score
from prorl_hpc.tasks.answers import after_thinking, read_options
from prorl_hpc.tasks.constraints import CHECKS, holds
from prorl_hpc.tasks.problems import Problem, ProblemTask, messages_of, split_problems


def make_instructions(name: str, config: TaskConfig, seed: int) -> ProblemTask:  # noqa: ARG001
    """Raises TaskError."""
    read_options(name, config.options, {})
    problems = split_problems(name, config, decode=lambda row: _decode(row, config.system_prompt))
    return ProblemTask(name, problems, check=check)


def check(rules: JSON, response: str) -> Score:
    """The fraction of rules kept; component `all` is 1 when every one is."""
    text = after_thinking(response)
    if not text:
        return Score(reward=0.0, outcome=Outcome.invalid)
    kept = [holds(text, name, arguments) for name, arguments in rules]
    fraction = sum(kept) / len(kept)
    return Score(reward=fraction, components={"kept": fraction, "all": float(all(kept))})


def _decode(row: dict[str, Any], system_prompt: str | None) -> Problem:
    names = row["instruction_id_list"]
    given = row.get("kwargs") or [{} for _ in names]
    if not names or len(names) != len(given):
        raise ValueError(f"{len(names)} instructions with {len(given)} kwargs; give one for each")
    for name, arguments in zip(names, given, strict=True):
        if name not in CHECKS:
            close = get_close_matches(str(name), CHECKS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "docs/tasks.md lists them"
            raise ValueError(f"instruction {name!r} is unknown; {hint}")
        try:
            holds("text", name, arguments or {})
        except (TypeError, ValueError) as err:
            raise ValueError(f"instruction {name!r}: {err}") from err
    return Problem(
        messages=messages_of(row, key="prompt", system_prompt=system_prompt),
        answer=[[n, {k: v for k, v in (a or {}).items() if v is not None}]
                for n, a in zip(names, given, strict=True)],
        identity=str(row.get("key", "")),
    )  # fmt: skip
