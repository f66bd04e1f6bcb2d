"""What the metrics files of a run say, put in order. Reads files; draws and prints nothing.

A resumed learner repeats steps after its last checkpoint: the latest row of a step counts.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prorl_hpc.observe.metrics import Row, read_metrics
from prorl_hpc.run import Run

RATES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "groups_per_second": ("groups_seen", ("step_seconds",)),
    "tokens_per_second": ("batch_tokens", ("score_seconds", "train_seconds")),
}
"""Derived quantities: a count over a sum of seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reset:
    """One reset of the reference policy."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Validation of one policy version."""

    version: int
    step: int
    score: float
    by_task: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The surviving history of a run."""

    steps: tuple[Row, ...]
    """One row per optimizer step, ascending."""
    validations: tuple[Validation, ...]
    resets: tuple[Reset, ...]

    def curve(self, quantity: str) -> tuple[tuple[float, float | None], ...]:
        """(step, value) of a column or a rate."""
        return tuple((float(row["step"]), number(row, quantity)) for row in self.steps)


def read_history(run: Run) -> History:
    """The history as far as it is written."""
    rows = read_metrics(run.metrics("learner"))
    return History(
        steps=tuple(_by_step(row for row in rows if is_step(row))),
        validations=tuple(_validations(run)),
        resets=tuple(_resets(rows)),
    )


def is_step(row: Row) -> bool:
    """Whether the row reports an optimizer step of reinforcement learning."""
    return row.get("event") == "step" and isinstance(row.get("step"), int)


def number(row: Mapping[str, Any], quantity: str) -> float | None:
    """The row's finite value of a column, or of one of RATES; None when it has none."""
    if quantity in RATES and quantity not in row:
        count, parts = RATES[quantity]
        seconds = sum(number(row, part) or 0.0 for part in parts)
        found = number(row, count)
        return None if found is None or seconds <= 0 else found / seconds
    value = row.get(quantity)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def validation_of(row: Mapping[str, Any]) -> Validation | None:
    """A line of validation.jsonl; None for one that holds no score."""
    score, version, step = number(row, "score"), row.get("version"), row.get("step")
    if score is None or not isinstance(version, int) or not isinstance(step, int):
        return None
    tasks = row.get("tasks")
    by_task = {
        str(name): found
        for name, result in (tasks.items() if isinstance(tasks, dict) else ())
        if isinstance(result, dict) and (found := number(result, "reward")) is not None
    }
    return Validation(version=version, step=step, score=score, by_task=by_task)


def reset_of(row: Row) -> Reset | None:
    """The reset that a row reports, if any."""
    step = row.get("step")
    if row.get("event") != "reset" or not isinstance(step, int):
        return None
    return Reset(step=step, reason=str(row.get("reason") or row.get("trigger") or ""))


def _by_step(rows: Iterable[Row]) -> list[Row]:
    latest = {row["step"]: row for row in rows}
    return [latest[step] for step in sorted(latest)]


def _validations(run: Run) -> list[Validation]:
    found = [v for row in read_metrics(run.validation) if (v := validation_of(row)) is not None]
    latest = {one.version: one for one in found}
    return [latest[version] for version in sorted(latest)]


def _resets(rows: Iterable[Row]) -> list[Reset]:
    latest = {found.step: found for row in rows if (found := reset_of(row)) is not None}
    return [latest[step] for step in sorted(latest)]
