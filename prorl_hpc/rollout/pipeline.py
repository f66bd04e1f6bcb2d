"""INIT -> RUN -> EVAL of one attempt at an instance, each stage with its own bound.

    lease -> [INIT: instance, environment] -> [RUN: agent, engine] -> [EVAL: verifier] -> trajectory
                     init_workers              run_workers            eval_workers

Many attempts are in the pipeline at once; one that waits for a stage holds no place in another.
What becomes of an attempt is `prorl_hpc.rollout.attempt`'s. Knows no lease's bookkeeping.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hpc.errors import HpcError
from prorl_hpc.agents.episode import Agent, Conversation, Furnisher, Limits
from prorl_hpc.environment.base import (
    EndReason,
    Environment,
    EnvironmentEnded,
    EnvironmentSpec,
)
from prorl_hpc.inference.engine import Engine, EngineError, Sampling
from prorl_hpc.recipe import Recipe, TaskConfig
from prorl_hpc.records import Kind, Lease, Outcome, Score, Trajectory
from prorl_hpc.rollout.attempt import Attempt
from prorl_hpc.rollout.instances import Instances
from prorl_hpc.rollout.limits import TimeLimits
from prorl_hpc.rollout.scoring import VerifierTimeout
from prorl_hpc.rollout.verifier import Request
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.tasks.base import Task, VerifierError
from prorl_hpc.tasks.environment_task import EnvironmentTask, MakeEnvironment
from prorl_hpc.tasks.session_task import SessionTask

log = logging.getLogger("prorl_hpc.rollout")

RESULT_SECONDS = 300.0
"""Bound of taking the agent's result out of its environment."""


class Scorer(Protocol):
    """What scores the answers of tasks without an environment."""

    async def score(self, request: Request, *, timeout_seconds: float) -> Score: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a pipeline works with."""

    recipe: Recipe
    tasks: Mapping[str, Task]
    agents: Mapping[str, Agent]
    """By the key of the task."""
    tokenizer: Any
    engine: Engine
    versions: Versions
    scorer: Scorer
    make_environment: MakeEnvironment | None
    worker: str
    attempt: int
    limits: TimeLimits = field(default_factory=TimeLimits)
    clock: Callable[[], float] = time.monotonic


class Pipeline:
    """All attempts of one node."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        rollout = parts.recipe.rollout
        self._stages = {
            "init": asyncio.Semaphore(rollout.init_workers),
            "run": asyncio.Semaphore(rollout.run_workers),
            "eval": asyncio.Semaphore(rollout.eval_workers),
        }
        self.occupied = dict.fromkeys(self._stages, 0)
        """Attempts at work per stage, just now."""
        self._instances = Instances()
        # Asked once per task: `isinstance` of a protocol looks at every attribute, every time.
        self._sandboxed: dict[str, EnvironmentTask] = {
            name: task for name, task in parts.tasks.items() if isinstance(task, EnvironmentTask)
        }
        self._sessions: dict[str, SessionTask] = {
            name: task for name, task in parts.tasks.items() if isinstance(task, SessionTask)
        }

    async def produce(self, lease: Lease, rollout_index: int) -> Trajectory:
        """One attempt, whatever becomes of it. Only cancelling ends it without a trajectory.

        The caller has bound the lease's version (`Versions.bind`); it is unbound here.
        """
        parts = self._parts
        attempt = Attempt(
            lease=lease, rollout_index=rollout_index, worker=parts.worker,
            worker_attempt=parts.attempt, clock=parts.clock, started=parts.clock(),
        )  # fmt: skip
        bound = [lease.policy_version]
        try:
            async with AsyncExitStack() as stack:
                environment = await self._init(attempt, stack)
                async with parts.versions.held(lease.policy_version):
                    await self._run(attempt, environment)
                parts.versions.unbind(bound.pop())
                await self._take_result(attempt, environment)
            score = await self._eval(attempt)
            return attempt.finished(score)
        except HpcError as err:
            return attempt.failed(f"{type(err).__name__}: {err}")
        except Exception as err:
            # A defect here or in a task; one attempt must not end the node.
            log.exception("attempt %s of %s failed", rollout_index, lease.group_id)
            return attempt.failed(f"{type(err).__name__}: {err}")
        finally:
            for version in bound:
                parts.versions.unbind(version)
            if attempt.session is not None:
                await attempt.session.close()

    @asynccontextmanager
    async def _stage(self, attempt: Attempt, name: str) -> AsyncIterator[None]:
        """A place in a stage; its time goes to the attempt's timings."""
        attempt.stage = name
        async with self._stages[name]:
            self.occupied[name] += 1
            entered = self._parts.clock()
            try:
                yield
            finally:
                self.occupied[name] -= 1
                spent = self._parts.clock() - entered
                attempt.timings[name] = attempt.timings.get(name, 0.0) + spent

    async def _init(self, attempt: Attempt, stack: AsyncExitStack) -> Environment | None:
        parts, lease = self._parts, attempt.lease
        async with self._stage(attempt, "init"):
            instance = await self._instances.get(self._task(lease), lease)
            attempt.instance = instance
            if lease.task in self._sessions:
                attempt.session = self._sessions[lease.task].session(instance)
                await attempt.session.open()
                return None
            task = self._sandboxed.get(lease.task)
            if task is None:
                return None
            if parts.make_environment is None:
                raise EngineError(f"task {lease.task} needs an environment; this node makes none")
            # blocking: the first question for an image reads all of it
            spec = await asyncio.to_thread(task.environment_spec, instance)
            agent = parts.agents[lease.task]
            if not agent.needs_environment:
                attempt.result = b""  # its answer is all that it leaves behind
                return None
            if isinstance(agent, Furnisher):
                spec = agent.furnish(spec)
            environment = parts.make_environment(spec)
            try:
                async with asyncio.timeout(parts.recipe.rollout.environment_seconds):
                    await stack.enter_async_context(environment)
                    await task.setup(instance, environment)
            except TimeoutError as err:
                bound = parts.recipe.rollout.environment_seconds
                raise EngineError(f"the environment wasn't ready within {bound:g} s") from err
            attempt.isolated(environment.isolation)
            return environment

    async def _run(self, attempt: Attempt, environment: Environment | None) -> None:
        parts, lease = self._parts, attempt.lease
        assert attempt.instance is not None
        config = parts.recipe.tasks[lease.task]
        attempt.conversation = self._conversation(attempt, config)
        async with self._stage(attempt, "run"):
            bound = parts.recipe.rollout.episode_seconds
            paused = parts.limits.paused_seconds
            try:
                async with parts.limits.timeout(bound) as limit:
                    agent = parts.agents[lease.task]
                    if attempt.session is not None:
                        await attempt.session.lead(agent, attempt.conversation)
                    else:
                        await agent.run(
                            attempt.conversation,
                            messages=attempt.instance.messages,
                            environment=environment,
                        )
            except EnvironmentEnded as err:
                timed = err.reason in (EndReason.wall, EndReason.idle)
                if timed and parts.limits.paused_seconds > paused:
                    raise EngineError(f"nobody served the policy meanwhile: {err}") from err
                attempt.outcome = Outcome.agent_timeout if timed else Outcome.invalid
                attempt.finish_reason = "time" if timed else "error"
                attempt.detail = str(err)
            except TimeoutError as err:
                if not limit.expired():
                    raise
                if not any(attempt.conversation.transcript.loss_mask):
                    raise EngineError(
                        f"no answer within {bound:g} s; is the engine alive?"
                    ) from err
                attempt.outcome, attempt.finish_reason = Outcome.agent_timeout, "time"
                attempt.detail = f"the episode took more than {bound:g} s"

    async def _take_result(self, attempt: Attempt, environment: Environment | None) -> None:
        """What the agent leaves behind; its environment is closed after this."""
        if environment is None or attempt.finish_reason == "error":
            return
        task = self._sandboxed[attempt.lease.task]
        assert attempt.instance is not None
        try:
            async with asyncio.timeout(RESULT_SECONDS):
                attempt.result = await task.result(attempt.instance, environment)
        except EnvironmentEnded as err:
            attempt.outcome = attempt.outcome or Outcome.invalid
            attempt.detail = attempt.detail or str(err)
        except TimeoutError as err:
            raise EngineError(f"taking the result took over {RESULT_SECONDS:g} s") from err

    async def _eval(self, attempt: Attempt) -> Score:
        conversation, instance = attempt.conversation, attempt.instance
        assert conversation is not None
        assert instance is not None
        lease = attempt.lease
        task = self._sandboxed.get(lease.task)
        config = self._parts.recipe.tasks[lease.task]
        if not any(conversation.transcript.loss_mask):
            attempt.detail = attempt.detail or "the prompt leaves no room for an answer"
            return Score(reward=0.0, outcome=Outcome.truncated)
        async with self._stage(attempt, "eval"):
            if task is not None:
                return await self._eval_in_environment(attempt, task, config)
            if attempt.outcome is Outcome.agent_timeout:
                return Score(reward=0.0)
            if attempt.session is not None:
                return await attempt.session.score(conversation)
            request = Request(
                task=lease.task,
                kind=lease.kind,
                index=lease.instance_index,
                response=conversation.text,
            )
            try:
                return await self._parts.scorer.score(
                    request, timeout_seconds=config.score_timeout_seconds
                )
            except VerifierTimeout as err:
                # An answer that keeps the verifier busy for ever is no answer.
                attempt.detail = str(err)
                components = {"verifier_timeout": 1.0}
                return Score(reward=0.0, components=components, outcome=Outcome.invalid)

    async def _eval_in_environment(
        self, attempt: Attempt, task: EnvironmentTask, config: TaskConfig
    ) -> Score:
        assert attempt.conversation is not None
        assert attempt.instance is not None
        alone = not self._parts.agents[attempt.lease.task].needs_environment
        if attempt.result is None or (alone and attempt.outcome is Outcome.agent_timeout):
            return Score(reward=0.0)
        make = self._parts.make_environment
        assert make is not None
        opened: list[Environment] = []

        def make_environment(spec: EnvironmentSpec) -> Environment:
            opened.append(make(spec))
            return opened[-1]

        try:
            async with asyncio.timeout(config.score_timeout_seconds):
                score = await task.score_in(
                    attempt.instance,
                    result=attempt.result,
                    response=attempt.conversation.text,
                    make_environment=make_environment,
                )
        except TimeoutError as err:
            raise VerifierError(
                f"scoring took more than tasks.{task.name}.score_timeout_seconds="
                f"{config.score_timeout_seconds:g}"
            ) from err
        if opened and not attempt.isolation:
            attempt.isolated(opened[0].isolation)
        return score

    def _task(self, lease: Lease) -> Task:
        try:
            return self._parts.tasks[lease.task]
        except KeyError as err:
            raise VerifierError(f"task {lease.task!r} of a lease isn't in the recipe") from err

    def _conversation(self, attempt: Attempt, config: TaskConfig) -> Conversation:
        parts, lease = self._parts, attempt.lease
        recipe = parts.recipe
        context_tokens = lease.context_tokens or recipe.model.context_tokens
        most = config.max_new_tokens or recipe.rollout.max_new_tokens
        return Conversation(
            tokenizer=parts.tokenizer,
            engine=parts.engine,
            sampling=replace(
                sampling_of(recipe, config, kind=lease.kind), policy_version=lease.policy_version
            ),
            limits=Limits(
                context_tokens=context_tokens, max_new_tokens=most, max_turns=config.max_turns
            ),
            seed=lease.seed,
            rollout_index=attempt.rollout_index,
            affinity=f"{lease.group_id}-{attempt.rollout_index}",
        )


def sampling_of(recipe: Recipe, config: TaskConfig, *, kind: Kind) -> Sampling:
    """How answers of a task are drawn, for training or for validation."""
    if kind is Kind.validation:
        validation = recipe.validation
        return Sampling(
            temperature=validation.temperature, top_p=validation.top_p, max_new_tokens=1
        )
    temperature = config.temperature or recipe.algorithm.temperature
    return Sampling(temperature=temperature, max_new_tokens=1)
