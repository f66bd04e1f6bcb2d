"""Validation of a policy version inside the loop. Rank 0 only; knows the client, no model."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from hpc.files import append_line
from prorl_hpc.buffer.messages import GroupRef
from prorl_hpc.evaluation.estimators import blended_score
from prorl_hpc.recipe import Recipe
from prorl_hpc.records import Group

FORMAT = 1
POLL_SECONDS = 2.0


class ValidationSource(Protocol):
    """The part of the buffer's client that validation needs."""

    @property
    def phase(self) -> str: ...

    def validate(self, version: int, counts: dict[str, int], num_rollouts: int) -> None: ...

    def validation_results(
        self, version: int, timeout_seconds: float = 0.0
    ) -> list[GroupRef] | None: ...

    def validation_given_up(self, version: int) -> int: ...

    def damaged(self, shard: int, *, group_id: int, reason: str) -> None: ...


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a validation."""

    reward: float
    """Mean over instances of the mean over rollouts."""
    solved: float
    """Share of rollouts with the full reward of 1."""
    instances: int
    rollouts: int
    response_tokens: float


class ValidationLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `metrics/validation.jsonl`."""

    format: int
    time: float
    step: int
    version: int
    score: float | None
    """Blended by the tasks' validation weights; None when nothing of one of them came back."""
    tasks: dict[str, TaskResult]
    seconds: float
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupted:
    """The learner is to stop; the validation is asked for again by its next attempt."""


def run_validation(
    recipe: Recipe,
    *,
    source: ValidationSource,
    read: Callable[[GroupRef], Group],
    step: int,
    version: int,
    stopping: Callable[[], bool],
    now: Callable[[], float] = time.monotonic,
) -> ValidationLine | Interrupted:
    """Asks for a validation of `version` and waits for it, within `learner.batch_seconds`.

    One that doesn't come back in time has no score; training goes on without it.
    """
    counts = {
        name: task.validation_size
        for name, task in recipe.tasks.items()
        if task.validation_weight > 0
    }
    started = now()
    if not counts:
        return _line(step, version, {}, None, 0.0, "no task has a validation_weight above 0")
    source.validate(version, counts, recipe.validation.num_rollouts)
    while True:
        refs = source.validation_results(version, timeout_seconds=POLL_SECONDS)
        seconds = now() - started
        groups = None if refs is None else _read_all(refs, source=source, read=read)
        if refs is not None and groups is not None:
            break
        if stopping() or source.phase != "running":
            return Interrupted()
        if seconds > recipe.learner.batch_seconds:
            note = f"not done within learner.batch_seconds={recipe.learner.batch_seconds:g}"
            return _line(step, version, {}, None, seconds, note)
    results = summarise(groups)
    score, notes = None, []
    if given_up := source.validation_given_up(version):
        notes.append(f"{given_up} instances were given up (infrastructure failures)")
    lost = [name for name in counts if name not in results]
    if lost:
        # A blend of the other tasks would move without any change of the policy.
        notes.append(f"no score: none of {', '.join(lost)} came back")
    else:
        weights = {name: recipe.tasks[name].validation_weight for name in counts}
        score = blended_score({name: r.reward for name, r in results.items()}, weights)
    return _line(step, version, results, score, now() - started, "; ".join(notes))


def _read_all(
    refs: Sequence[GroupRef], *, source: ValidationSource, read: Callable[[GroupRef], Group]
) -> list[Group] | None:
    """The groups; None, and the buffer has them made again, when a shard can't be read."""
    from prorl_hpc.buffer.shard import ShardDamaged

    groups = []
    for ref in refs:
        try:
            groups.append(read(ref))
        except ShardDamaged as err:
            source.damaged(err.shard, group_id=ref.group_id, reason=str(err))
            return None
    return groups


def summarise(groups: Sequence[Group]) -> dict[str, TaskResult]:
    """Results by task, in the order of their names."""
    results = {}
    for task in sorted({group.task for group in groups}):
        rewards = [
            [t.reward for t in group.trajectories if t.reward is not None]
            for group in groups
            if group.task == task
        ]
        scored = [values for values in rewards if values]
        if not scored:
            continue
        flat = [reward for values in scored for reward in values]
        lengths = [
            int(t.loss_mask.sum())
            for group in groups
            if group.task == task
            for t in group.trajectories
        ]
        results[task] = TaskResult(
            reward=float(np.mean([np.mean(values) for values in scored])),
            solved=float(np.mean([reward >= 1.0 - 1e-6 for reward in flat])),
            instances=len(scored),
            rollouts=len(flat),
            response_tokens=float(np.mean(lengths)),
        )
    return results


def record(path: Path, line: ValidationLine) -> None:
    """Appends the line, durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, line=msgspec.json.encode(line))


def read_validations(path: Path) -> list[ValidationLine]:
    """All whole lines; a torn last one (a crash) is left out. Raises ValueError if newer."""
    if not path.exists():
        return []
    lines = []
    for raw in path.read_bytes().split(b"\n"):
        try:
            line = msgspec.json.decode(raw, type=ValidationLine)
        except msgspec.DecodeError:
            continue
        if line.format > FORMAT:
            raise ValueError(
                f"{path} has format {line.format}, newer than {FORMAT}; update prorl-hpc"
            )
        lines.append(line)
    return lines


def _line(
    step: int,
    version: int,
    tasks: dict[str, TaskResult],
    score: float | None,
    seconds: float,
    note: str,
) -> ValidationLine:
    return ValidationLine(
        format=FORMAT,
        time=time.time(),
        step=step,
        version=version,
        score=score,
        tasks=tasks,
        seconds=seconds,
        note=note,
    )
