"""What the metrics files of a run say, put in order. Reads files; draws and prints nothing.

A resumed learner repeats steps after its last checkpoint: the latest row of a step counts.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prorl_hpc.observe.metrics import Row, read_metrics
from prorl_hpc.run import Run

NAMES: Mapping[str, tuple[str, ...]] = {
    "reward": ("reward", "reward_mean", "raw_reward"),
    "kl": ("kl", "kl_reference", "reference_kl"),
    "staleness": ("staleness", "staleness_mean", "mean_staleness"),
    "groups_per_second": ("groups_per_second", "groups_per_s"),
    "tokens_per_second": ("tokens_per_second", "tokens_per_s"),
    "entropy": ("entropy",),
    "loss": ("loss",),
    "length": ("length", "response_tokens", "mean_length", "completion_tokens"),
    "gradient_norm": ("gradient_norm", "grad_norm"),
    "score": ("score", "blended", "accuracy", "reward", "mean"),
}
"""Quantity: the keys under which rows may hold it, the first one first."""


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
    warmup: tuple[Row, ...]
    validations: tuple[Validation, ...]
    resets: tuple[Reset, ...]

    def curve(self, quantity: str) -> tuple[tuple[float, float | None], ...]:
        """(step, value) of a quantity of NAMES."""
        return tuple((float(row["step"]), number(row, quantity)) for row in self.steps)


def read_history(run: Run) -> History:
    """The history as far as it is written."""
    rows = read_metrics(run.metrics("learner"))
    return History(
        steps=tuple(_by_step(row for row in rows if is_step(row))),
        warmup=tuple(row for row in rows if row.get("stage") == "warmup"),
        validations=tuple(_validations(run)),
        resets=tuple(_resets(rows)),
    )


def is_step(row: Row) -> bool:
    """Whether the row reports an optimizer step of reinforcement learning."""
    return (
        isinstance(row.get("step"), int)
        and row.get("stage") in (None, "train", "rl")
        and number(row, "reward") is not None
    )


def number(row: Mapping[str, Any], quantity: str) -> float | None:
    """The row's value of a quantity; None when it has none."""
    for name in NAMES.get(quantity, (quantity,)):
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def validation_of(row: Mapping[str, Any]) -> Validation | None:
    """A line of validation.jsonl; None for one that holds no score."""
    score = number(row, "score")
    version = row.get("version", row.get("step"))
    if score is None or not isinstance(version, int):
        return None
    tasks = row.get("tasks") or row.get("by_task") or row.get("per_task") or {}
    step = row.get("step", version)
    return Validation(
        version=version,
        step=step if isinstance(step, int) else version,
        score=score,
        by_task={
            str(name): found
            for name, value in tasks.items()
            if (found := number(value if isinstance(value, dict) else {"score": value}, "score"))
            is not None
        },
    )


def reset_of(row: Row) -> Reset | None:
    """The reset that a row reports, if any."""
    reason = row.get("reset_reason") or (row.get("reason") if row.get("event") == "reset" else None)
    happened = bool(row.get("reset")) or row.get("event") == "reset"
    step = row.get("step")
    if not happened or not isinstance(step, int):
        return None
    return Reset(step=step, reason=str(reason or row.get("trigger") or ""))


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
