"""Recipes, leases and pipelines for the tests of a rollout node."""

from collections.abc import Callable
from typing import Any

from prorl_hpc.agents.characters import build_character_tokenizer
from prorl_hpc.agents.registry import make_agent
from prorl_hpc.recipe import (
    AlgorithmConfig,
    BufferConfig,
    ModelConfig,
    Recipe,
    RolloutConfig,
    TaskConfig,
    ValidationConfig,
)
from prorl_hpc.records import Instance, Kind, Lease, Message, Outcome, Score
from prorl_hpc.rollout.pipeline import Parts, Pipeline
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.run import Run
from tests.fakes.tiny_model import CHARACTERS

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def make_recipe(**rollout: Any) -> Recipe:
    """Sums of one-digit numbers for a tiny model."""
    return Recipe(
        name="test",
        steps=2,
        tasks={
            "sums": TaskConfig(
                kind="logic",
                options={"family": "chain_sum", "parameters": SUMS},
                validation_size=8,
                score_timeout_seconds=60.0,
            )
        },
        model=ModelConfig(context_tokens=128),
        algorithm=AlgorithmConfig(batch_groups=2, num_rollouts=4, max_staleness=1),
        rollout=RolloutConfig(
            **(
                {"max_new_tokens": 6, "init_workers": 2, "run_workers": 8, "eval_workers": 1}
                | rollout
            )
        ),
        buffer=BufferConfig(peer_seconds=90.0, lease_seconds=30.0),
        validation=ValidationConfig(temperature=0.0),
    )


def make_lease(**values: Any) -> Lease:
    defaults: dict[str, Any] = {
        "lease_id": 1,
        "group_id": 7,
        "kind": Kind.train,
        "task": "sums",
        "instance_index": 3,
        "rollouts": (0, 1, 2, 3),
        "num_rollouts": 4,
        "seed": 11,
        "policy_version": None,
        "deadline_seconds": 600.0,
    }
    return Lease(**(defaults | values))


class EchoTask:
    """Asks for a number; the answer is right when it is the instance's index."""

    def __init__(self, name: str = "sums") -> None:
        self.name = name

    def size(self, kind: Kind) -> int:
        return 100

    def instance(self, index: int, *, kind: Kind) -> Instance:
        message = Message(role="user", content=f"say {index}")
        return Instance(
            task=self.name, instance_id=f"echo-{index}", index=index, messages=(message,)
        )

    def score(self, instance: Instance, response: str) -> Score:
        if not response:
            return Score(reward=0.0, outcome=Outcome.invalid)
        return Score(reward=float(response == str(instance.index)))


class LocalScorer:
    """Scores in this process."""

    def __init__(self, task: Any, *, before: Callable[[], Any] | None = None) -> None:
        self._task = task
        self._before = before

    async def score(self, request: Any, *, timeout_seconds: float) -> Score:
        if self._before is not None:
            await self._before()
        instance = self._task.instance(request.index, kind=request.kind)
        return self._task.score(instance, request.response)


def make_tokenizer() -> Any:
    return build_character_tokenizer(CHARACTERS)


def make_pipeline(
    engine: Any,
    *,
    run: Run,
    recipe: Recipe | None = None,
    task: Any = None,
    scorer: Any = None,
    tokenizer: Any = None,
    make_environment: Any = None,
) -> Pipeline:
    recipe = recipe or make_recipe()
    task = task or EchoTask()
    tokenizer = tokenizer or make_tokenizer()
    return Pipeline(
        Parts(
            recipe=recipe,
            tasks={"sums": task},
            agents={"sums": make_agent(recipe.tasks["sums"], tokenizer=tokenizer)},
            tokenizer=tokenizer,
            engine=engine,
            versions=Versions(engine, run=run, publish_seconds=0.1),
            scorer=scorer or LocalScorer(task),
            make_environment=make_environment,
            worker="rollout-0",
            attempt=1,
        )
    )
