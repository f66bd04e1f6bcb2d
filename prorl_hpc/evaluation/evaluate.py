"""pass@k of one model over the validation instances of tasks, through the rollout pipeline.

In process: the same pipeline, agents and verifiers as a rollout node's, without a buffer. Knows no
command line.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prorl_hpc.choices import InferencePlacement
from prorl_hpc.evaluation.estimators import (
    EvaluationError,
    Interval,
    bootstrap_interval,
    pass_at_k,
)
from prorl_hpc.recipe import Recipe
from prorl_hpc.records import Kind, Lease, Trajectory
from prorl_hpc.run import Run

Report = Callable[[int, int], None]
"""Called with (rollouts done, rollouts in all)."""

FORMAT = 1
SOLVED = 1.0 - 1e-6
"""A reward from here on counts as solved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskScore:
    """One task's results; intervals are 95 % bootstraps over instances."""

    instances: int
    samples: int
    """Usable rollouts per instance, at least."""
    reward: Interval
    pass_at: dict[int, Interval]
    """By k."""
    response_tokens: float
    failures: int
    """Rollouts lost to the infrastructure; left out of every number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The results of one model."""

    target: str
    temperature: float
    top_p: float
    tasks: dict[str, TaskScore]


def with_engine(recipe: Recipe) -> Recipe:
    """The recipe of a node that has engine and attempts together, as an evaluation has.

    Of a run whose engines have jobs of their own: what those jobs have, and a rollout node's room.
    """
    served = recipe.inference
    if served.placement is not InferencePlacement.own_jobs:
        return recipe
    return replace(
        recipe,
        inference=replace(served, placement=InferencePlacement.rollout_nodes),
        rollout=replace(
            recipe.rollout,
            gpus_per_node=served.gpus_per_node,
            cpus_per_node=max(served.cpus_per_node, recipe.rollout.cpus_per_node),
            memory_mib=max(served.memory_mib, recipe.rollout.memory_mib),
        ),
    )


async def evaluate(
    recipe: Recipe,
    *,
    model: Path,
    target: str,
    num_samples: int,
    ks: Sequence[int],
    scratch: Path,
    report: Report | None = None,
) -> Evaluation:
    """Samples `num_samples` rollouts of each validation instance and scores them.

    Temperature and top-p are those of `recipe.validation`. Raises EngineError when the model can't
    be served, EvaluationError when a task has no instance with the samples that a k needs.
    """
    trajectories = await _sample(
        with_engine(recipe), model=model, num_samples=num_samples, scratch=scratch, report=report
    )
    return Evaluation(
        target=target,
        temperature=recipe.validation.temperature,
        top_p=recipe.validation.top_p,
        tasks=score_tasks(trajectories, ks=ks, seed=recipe.seed),
    )


def plan_leases(recipe: Recipe, *, sizes: Mapping[str, int], num_samples: int) -> list[Lease]:
    """One lease per validation instance, in the order of `sizes`: how many each task has."""
    wanted = [(name, index) for name, size in sizes.items() for index in range(size)]
    return [
        Lease(
            lease_id=number,
            group_id=number,
            kind=Kind.validation,
            task=name,
            instance_index=index,
            rollouts=tuple(range(num_samples)),
            num_rollouts=num_samples,
            seed=_seed(recipe.seed, name, index),
            policy_version=None,
            deadline_seconds=recipe.rollout.episode_seconds,
        )
        for number, (name, index) in enumerate(wanted)
    ]


def _seed(seed: int, task: str, index: int) -> int:
    text = f"evaluation:{seed}:{task}:{index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


async def _sample(
    recipe: Recipe,
    *,
    model: Path,
    num_samples: int,
    scratch: Path,
    report: Report | None,
) -> list[Trajectory]:
    """Every rollout of every validation instance, through one pipeline."""
    from prorl_hpc.agents.registry import make_agent
    from prorl_hpc.agents.render import load_tokenizer
    from prorl_hpc.inference.pool import make_engine
    from prorl_hpc.rollout.environments import open_environments
    from prorl_hpc.rollout.pipeline import Parts, Pipeline
    from prorl_hpc.rollout.scoring import VerifierPool
    from prorl_hpc.rollout.versions import Versions
    from prorl_hpc.tasks.registry import make_tasks

    tokenizer = load_tokenizer(model)
    tasks = make_tasks(recipe)
    sizes = {name: task.size(Kind.validation) for name, task in tasks.items()}
    leases = plan_leases(recipe, sizes=sizes, num_samples=num_samples)
    async with AsyncExitStack() as stack:
        make_environment = await asyncio.to_thread(
            open_environments, stack, tasks, scratch / "environments"
        )
        workers = recipe.rollout.eval_workers
        scorer = VerifierPool(recipe.tasks, seed=recipe.seed, num_workers=workers)
        stack.push_async_callback(scorer.close)
        engine = make_engine(recipe, path=model, version=0)
        stack.push_async_callback(engine.close)
        await engine.start()
        pipeline = Pipeline(
            Parts(
                recipe=recipe,
                tasks=tasks,
                agents={
                    n: make_agent(t, tokenizer=tokenizer, task=tasks.get(n))
                    for n, t in recipe.tasks.items()
                },
                tokenizer=tokenizer,
                engine=engine,
                versions=Versions(engine, run=Run(scratch)),
                scorer=scorer,
                make_environment=make_environment,
                worker="evaluation",
                attempt=1,
            )
        )
        return await _produce_all(pipeline.produce, leases, report=report)


async def _produce_all(
    produce: Callable[[Lease, int], Coroutine[None, None, Trajectory]],
    leases: Sequence[Lease],
    *,
    report: Report | None,
) -> list[Trajectory]:
    tasks = [asyncio.ensure_future(produce(lease, i)) for lease in leases for i in lease.rollouts]
    done = 0
    try:
        for next_one in asyncio.as_completed(tasks):
            await next_one
            done += 1
            if report is not None:
                report(done, len(tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


def score_tasks(
    trajectories: Sequence[Trajectory], *, ks: Sequence[int], seed: int
) -> dict[str, TaskScore]:
    """Results by task; an instance without a usable rollout is left out, and of pass@k one with
    fewer than k of them.

    Raises EvaluationError when that leaves no instance of a task.
    """
    by_task: dict[str, dict[int, list[Trajectory]]] = {}
    for one in trajectories:
        by_task.setdefault(one.task, {}).setdefault(one.group_id, []).append(one)
    return {name: _score(name, groups, ks=ks, seed=seed) for name, groups in by_task.items()}


def _score(
    task: str, groups: Mapping[int, Sequence[Trajectory]], *, ks: Sequence[int], seed: int
) -> TaskScore:
    usable = [[t for t in group if t.reward is not None] for group in groups.values()]
    scored = [group for group in usable if group]
    if not scored:
        details = (one.detail or one.finish_reason for group in groups.values() for one in group)
        raise EvaluationError(
            f"task {task}: all rollouts were lost to the infrastructure, the first to "
            f"{next(details, 'nothing known')!r}; mend that, or leave the task out"
        )
    rewards = [[float(t.reward or 0.0) for t in group] for group in scored]
    solved = [sum(reward >= SOLVED for reward in values) for values in rewards]
    lengths = [int(t.loss_mask.sum()) for group in scored for t in group]
    return TaskScore(
        instances=len(scored),
        samples=min(len(group) for group in scored),
        reward=bootstrap_interval([sum(v) / len(v) for v in rewards], seed=seed),
        pass_at={
            k: _pass_at(list(zip(map(len, rewards), solved, strict=True)), k=k, seed=seed)
            for k in ks
        },
        response_tokens=sum(lengths) / len(lengths) if lengths else 0.0,
        failures=sum(len(g) for g in groups.values()) - sum(len(g) for g in scored),
    )


def _pass_at(counts: Sequence[tuple[int, int]], *, k: int, seed: int) -> Interval:
    """pass@k over the instances with (rollouts, solved ones) enough for it."""
    enough = [pair for pair in counts if pair[0] >= k]
    return bootstrap_interval(
        [pass_at_k(samples, right, k=k) for samples, right in enough or counts], seed=seed
    )


def to_json(evaluation: Evaluation) -> str:
    """The results as JSON text."""
    return json.dumps(as_data(evaluation), indent=2) + "\n"


def as_data(evaluation: Evaluation) -> dict[str, Any]:
    """The results as plain data; intervals as {mean, low, high}."""

    def plain(interval: Interval) -> dict[str, float]:
        return {"mean": interval.mean, "low": interval.low, "high": interval.high}

    tasks = {
        name: asdict(score)
        | {
            "reward": plain(score.reward),
            "pass_at": {str(k): plain(one) for k, one in score.pass_at.items()},
        }
        for name, score in evaluation.tasks.items()
    }
    return {
        "format": FORMAT,
        "target": evaluation.target,
        "temperature": evaluation.temperature,
        "top_p": evaluation.top_p,
        "tasks": tasks,
    }
