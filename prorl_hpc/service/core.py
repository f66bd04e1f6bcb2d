"""A pipeline that serves jobs: which task, which instance, how it is drawn. Knows no HTTP.

A posted instance takes the place of the task's own: it is prompted and scored as that task does.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc.errors import HpcError
from prorl_hpc.agents.render import decode_answer
from prorl_hpc.inference.engine import Engine
from prorl_hpc.records import Instance, Kind, Lease, Message, Score, Trajectory
from prorl_hpc.rollout.pipeline import Parts, Pipeline, Scorer
from prorl_hpc.rollout.verifier import Request
from prorl_hpc.service.schema import JobRequest, PostedInstance, TaskView
from prorl_hpc.service.store import StoredJob
from prorl_hpc.tasks.base import Task
from prorl_hpc.tasks.environment_task import EnvironmentTask
from prorl_hpc.tasks.session_task import SessionTask


class UnknownInstance(HpcError, LookupError):
    """No such task or instance here."""


class Core:
    """Turns jobs into trajectories."""

    def __init__(
        self, parts: Parts, *, loaded: Callable[[int, Path], None] = lambda *_: None
    ) -> None:
        """`loaded` hears of each version that a client has moved the engine to."""
        self._parts = parts
        self._loaded = loaded
        self._pipeline = Pipeline(parts)

    @property
    def engine(self) -> Engine:
        return self._parts.engine

    @property
    def occupied(self) -> dict[str, int]:
        """Samples per stage."""
        return self._pipeline.occupied

    def tasks(self) -> list[TaskView]:
        return [
            TaskView(
                name=name,
                train_size=task.size(Kind.train),
                validation_size=task.size(Kind.validation),
            )
            for name, task in self._parts.tasks.items()
        ]

    def check(self, request: JobRequest) -> None:
        """Raises UnknownInstance, or ValueError for a request that can't be run."""
        task = self._parts.tasks.get(request.task)
        if task is None:
            known = ", ".join(self._parts.tasks)
            raise UnknownInstance(f"task {request.task!r} isn't served; choose one of {known}")
        if (request.index is None) == (request.instance is None):
            raise ValueError("give either index or instance")
        if request.instance is not None and isinstance(task, EnvironmentTask):
            raise ValueError(f"task {request.task!r} works in environments; give an index")
        if request.instance is not None and isinstance(task, SessionTask):
            task.check_instance(_instance(request.task, request.instance))
        size = task.size(Kind(request.kind))
        if request.index is not None and request.index >= size:
            raise UnknownInstance(
                f"instance {request.index} doesn't exist; task {request.task!r} has {size} for "
                f"{request.kind}"
            )

    async def produce(self, job: StoredJob, request: JobRequest, sample: int) -> Trajectory:
        """One attempt, whatever becomes of it."""
        kind = Kind(request.kind)
        lease = Lease(
            lease_id=job.number,
            group_id=job.number,
            kind=kind,
            task=request.task,
            instance_index=request.index or 0,
            rollouts=(sample,),
            num_rollouts=request.num_samples,
            seed=request.seed,
            policy_version=None,
            deadline_seconds=request.deadline_seconds or 0.0,
        )
        return await self._variant(request).produce(lease, sample)

    async def load(self, version: int, *, path: Path) -> None:
        """Moves the engine to a published version in flight.

        Raises ValueError for a path that no engine could load, else EngineError.
        """
        if not path.is_absolute() or not _is_directory(path):
            raise ValueError(f"path={str(path)!r} isn't the absolute path of a directory here")
        await self.engine.load(version, path=path)
        self._loaded(version, path)

    def text(self, ids: Sequence[int]) -> str:
        """The text of sampled ids."""
        return decode_answer(self._parts.tokenizer, ids)

    def _variant(self, request: JobRequest) -> Pipeline:
        """The pipeline with this request's sampling and instance; stages are shared by all."""
        parts = self._parts
        config = parts.recipe.tasks[request.task]
        recipe = parts.recipe
        if request.temperature is not None:
            config = replace(config, temperature=request.temperature)
            validation = replace(recipe.validation, temperature=request.temperature)
            recipe = replace(recipe, validation=validation)
        if request.max_new_tokens is not None:
            config = replace(config, max_new_tokens=request.max_new_tokens)
        recipe = replace(recipe, tasks=recipe.tasks | {request.task: config})
        parts = replace(parts, recipe=recipe)
        if request.instance is not None:
            instance = _instance(request.task, request.instance)
            tasks = dict(parts.tasks) | {request.task: _Posted(parts.tasks[request.task], instance)}
            parts = replace(parts, tasks=tasks, scorer=_PostedScorer(parts.scorer, instance))
        variant = copy.copy(self._pipeline)
        variant._parts = parts
        return variant


class _Posted:
    """A task whose only instance is the client's."""

    def __init__(self, task: Task, instance: Instance) -> None:
        self.name = task.name
        self._task = task
        self._instance = instance

    def size(self, kind: Kind) -> int:
        return self._task.size(kind)

    def instance(self, index: int, *, kind: Kind) -> Instance:  # noqa: ARG002
        return self._instance

    def score(self, instance: Instance, response: str) -> Score:
        return self._task.score(instance, response)


class _PostedScorer:
    """Tells the verifier which instance an answer belongs to."""

    def __init__(self, scorer: Scorer, instance: Instance) -> None:
        self._scorer = scorer
        self._instance = instance

    async def score(self, request: Request, *, timeout_seconds: float) -> Score:
        fields: dict[str, Any] = {
            name: getattr(request, name) for name in request.__struct_fields__
        }
        fields["instance"] = self._instance
        return await self._scorer.score(Request(**fields), timeout_seconds=timeout_seconds)


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _instance(task: str, posted: PostedInstance) -> Instance:
    return Instance(
        task=task,
        instance_id=posted.instance_id,
        index=0,
        messages=tuple(Message(role=m.role, content=m.content) for m in posted.messages),
        answer=posted.answer,
        metadata=posted.metadata,
    )
