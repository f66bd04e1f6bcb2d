"""Everything that a rollout node needs, made in order: peers, policy, tasks, engine, verifiers.

Waits are bounded and name who is missing. Knows how the parts fit; does no work itself.
"""

import asyncio
import hashlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from hpc import endpoints
from hpc.allocation import Allocation, StopFlag, cpu_count
from hpc.errors import HpcError
from prorl_hpc.agents.registry import make_agent
from prorl_hpc.agents.render import load_tokenizer, render_prompt
from prorl_hpc.buffer.client import RolloutClient, locate_buffer
from prorl_hpc.buffer.keys import load_client_keys
from prorl_hpc.inference.pool import make_engine
from prorl_hpc.observe.metrics import MetricsWriter
from prorl_hpc.over import LearnerWatch, learner_end
from prorl_hpc.policy import PolicyError, latest_version, verify_policy
from prorl_hpc.recipe import Recipe, load_recipe
from prorl_hpc.records import Kind
from prorl_hpc.rollout.environments import open_environments
from prorl_hpc.rollout.health import Health
from prorl_hpc.rollout.pipeline import Parts, Pipeline
from prorl_hpc.rollout.scoring import VerifierPool
from prorl_hpc.rollout.serving import Serving, is_served, open_own, open_served
from prorl_hpc.rollout.spool import Spool
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.rollout.worker import End, Terms, Worker
from prorl_hpc.run import Run
from prorl_hpc.tasks.base import Task
from prorl_hpc.tasks.environment_task import MakeEnvironment
from prorl_hpc.tasks.registry import make_tasks

log = logging.getLogger("prorl_hpc.rollout")

POLL_SECONDS = 0.2
SILENT_SECONDS = 10.0
"""A buffer that says nothing for so long may have left: the ledger knows."""

T = TypeVar("T")


class PeerMissing(HpcError, TimeoutError):
    """The learner or the buffer was not there in time; the message says what is known of it."""


async def work(run: Run, *, allocation: Allocation, stop: StopFlag) -> End:
    """One attempt of a rollout node, from its start to its end.

    Raises UserError for what the user must mend, EndpointTimeout and PeerMissing for absent peers.
    """
    recipe = load_recipe(run.recipe)
    if (over := learner_end(run)) and over.finished:
        return End(reason=over.reason, finished=True)
    tasks = make_tasks(recipe)
    await asyncio.to_thread(_await_buffer, run, recipe, stop)
    version = await await_policy(run, recipe, stop=stop)
    async with AsyncExitStack() as stack:
        tokenizer = await asyncio.to_thread(load_tokenizer, _tokenizer_path(run, version))
        await asyncio.to_thread(check_prompts, recipe, tasks, tokenizer)
        environments = environments_directory(allocation)
        make_environment = await asyncio.to_thread(open_environments, stack, tasks, environments)
        if is_served(recipe):
            serving = await open_served(stack, run, recipe, version=version, stop=stop)
        else:
            engine, digest = await stack.enter_async_context(engine_at(recipe, run, version))
            serving = open_own(stack, engine, Versions(engine, run=run, digest=digest))
        pipeline = _make_pipeline(
            stack, recipe, tasks=tasks, tokenizer=tokenizer, serving=serving,
            make_environment=make_environment, allocation=allocation,
        )  # fmt: skip
        connecting = RolloutClient.connect(
            locate_buffer(run),
            keys=load_client_keys(run, role="rollout"),
            run=run.name,
            worker=worker_name(allocation),
            attempt=allocation.attempt,
            patience_seconds=recipe.buffer.peer_seconds,
        )
        client = await unless_stopped(connecting, stop)
        stack.push_async_callback(client.close)
        spool = Spool(spool_directory(run, allocation), limit_bytes=recipe.rollout.spool_bytes)
        stack.callback(spool.close)
        metrics = stack.enter_context(MetricsWriter(run.metrics("rollout", index=allocation.index)))
        worker = Worker(
            client=client,
            pipeline=pipeline,
            versions=serving.versions,
            spool=spool,
            health=Health(),
            terms=terms_of(recipe),
            stop_reason=lambda: stop.reason or serving.missing(),
            run_over=_run_over(run, client),
            report=_reporter(metrics, allocation, more=serving.metrics),
        )
        return await worker.run()


def _run_over(run: Run, client: RolloutClient) -> Callable[[], str]:
    """Whether all steps are done, for a node that the buffer left without telling it."""
    watch = LearnerWatch(run)

    def reason() -> str:
        if client.silent_seconds < SILENT_SECONDS:
            return ""
        end = watch()
        return end.reason if end is not None and end.finished else ""

    return reason


async def unless_stopped(peer: Coroutine[Any, Any, T], stop: StopFlag) -> T:
    """What waiting for a peer gives; raises PeerMissing once a stop is asked for."""
    task = asyncio.ensure_future(peer)
    while not task.done() and not stop.stopping:
        await asyncio.wait([task], timeout=POLL_SECONDS)
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
        raise PeerMissing(f"the buffer didn't answer before the stop ({stop.reason})")
    return task.result()


def worker_name(allocation: Allocation) -> str:
    """The same for all attempts of one index, so that a newer one fences an older."""
    return f"{allocation.job}-{allocation.index}"


def spool_directory(run: Run, allocation: Allocation) -> Path:
    """Beside the attempts' own directories, so that it outlives one of them on this node.

    Named by the run's keys, and the only one: a run that was deleted and submitted again at the
    same path has the same group ids, and must not be handed what its namesake left.
    """
    public = load_client_keys(run, role="rollout").server_public
    mine = allocation.scratch.parent / f"spool-{hashlib.sha256(public).hexdigest()[:12]}"
    for other in allocation.scratch.parent.glob(f"spool-{12 * '?'}"):
        if other != mine:
            shutil.rmtree(other, ignore_errors=True)
    return mine


def environments_directory(allocation: Allocation) -> Path:
    """One for all runs of the user on this node: each worker sweeps what dead ones left there."""
    return allocation.scratch.parent.parent / "environments"


def terms_of(recipe: Recipe) -> Terms:
    """What a node takes on at once: what the stages hold, and a little in waiting."""
    rollout = recipe.rollout
    return Terms(
        capacity=rollout.run_workers + rollout.init_workers,
        heartbeat_seconds=recipe.buffer.lease_seconds / 4,
    )


def check_prompts(recipe: Recipe, tasks: dict[str, Task], tokenizer: Any) -> None:
    """Renders one prompt per task: raises UserError for a template or vocabulary that can't."""
    for name, task in tasks.items():
        make_agent(recipe.tasks[name], tokenizer=tokenizer, task=task)
        instance = task.instance(0, kind=Kind.validation)
        render_prompt(tokenizer, instance.messages)


def _tokenizer_path(run: Run, version: int) -> Path:
    """The starting policy's directory: a version may be removed while this node starts."""
    return run.model_start if run.model_start.is_dir() else run.policy(version)


@asynccontextmanager
async def engine_at(recipe: Recipe, run: Run, version: int) -> AsyncIterator[tuple[Any, str]]:
    """The engine, started with a verified version: this one, or the newest once it is gone.

    With it the digest of the manifest it was started from.
    """
    while True:
        try:
            engine, digest = await _start_engine(recipe, run, version)
            break
        except (HpcError, OSError):
            newest = latest_version(run)
            if run.policy(version).is_dir() or newest is None or newest == version:
                raise
            log.info("version %d was removed meanwhile; starting with %d", version, newest)
            version = newest
    try:
        yield engine, digest
    finally:
        await engine.close()


async def _start_engine(recipe: Recipe, run: Run, version: int) -> tuple[Any, str]:
    path = run.policy(version)
    manifest = await asyncio.to_thread(verify_policy, path)
    engine = make_engine(recipe, path=path, version=version)
    try:
        await engine.start()
    except BaseException:
        await engine.close()
        raise
    return engine, manifest.digest


def _make_pipeline(
    stack: AsyncExitStack,
    recipe: Recipe,
    *,
    tasks: dict[str, Task],
    tokenizer: Any,
    serving: Serving,
    make_environment: MakeEnvironment | None,
    allocation: Allocation,
) -> Pipeline:
    scorer = VerifierPool(
        recipe.tasks,
        seed=recipe.seed,
        num_workers=min(recipe.rollout.eval_workers, max(cpu_count(), 1)),
    )
    stack.push_async_callback(scorer.close)
    return Pipeline(
        Parts(
            recipe=recipe,
            tasks=tasks,
            agents={
                n: make_agent(c, tokenizer=tokenizer, task=tasks.get(n))
                for n, c in recipe.tasks.items()
            },
            tokenizer=tokenizer,
            engine=serving.engine,
            versions=serving.versions,
            limits=serving.limits,
            scorer=scorer,
            make_environment=make_environment,
            worker=worker_name(allocation),
            attempt=allocation.attempt,
        )
    )


def _await_buffer(run: Run, recipe: Recipe, stop: StopFlag) -> None:
    endpoints.await_endpoint(
        run,
        "buffer",
        run_id=run.name,
        timeout_seconds=recipe.buffer.peer_seconds,
        stopping=lambda: stop.stopping,
    )


async def await_policy(run: Run, recipe: Recipe, *, stop: StopFlag) -> int:
    """The newest published version, once there is one."""
    deadline = time.monotonic() + recipe.buffer.peer_seconds
    while not stop.stopping and time.monotonic() < deadline:
        try:
            version = latest_version(run)
        except PolicyError as err:
            log.warning("%s", err)
            version = None
        if version is not None:
            return version
        await asyncio.sleep(POLL_SECONDS)
    why = stop.reason or f"waited {recipe.buffer.peer_seconds:.0f} s"
    culprit = endpoints.culprit(run, "learner")
    raise PeerMissing(f"no policy was published ({why}); learner: {culprit}")


def _reporter(
    metrics: MetricsWriter, allocation: Allocation, *, more: Callable[[], dict[str, object]]
) -> Callable[[Worker], None]:
    """Writes a row of totals and rates, and the progress that keeps the chain going."""
    before = _progress_before(allocation)
    last = (time.monotonic(), 0, 0)

    def report(worker: Worker) -> None:
        nonlocal last
        counters, now = worker.counters, time.monotonic()
        seconds = max(now - last[0], 1e-6)
        try:
            metrics.write(
                attempt=allocation.attempt,
                version=worker.versions.version,
                in_flight=worker.in_flight,
                occupied=worker.pipeline.occupied,
                trajectories=counters.trajectories,
                trajectories_per_second=(counters.trajectories - last[1]) / seconds,
                tokens_per_second=(counters.sampled_tokens - last[2]) / seconds,
                outcomes=dict(worker.health.outcomes),
                pushed=counters.results,
                stage_seconds=counters.stage_seconds,
                spool_bytes=worker.spool.num_bytes,
                note=worker.versions.last_error or worker.health.note,
                **more(),
            )
            allocation.record_progress(before + counters.stored)
        except OSError as err:  # a full disk must not end the node
            log.warning("metrics can't be written: %s", err)
        last = (now, counters.trajectories, counters.sampled_tokens)

    return report


def _progress_before(allocation: Allocation) -> float:
    path = allocation.run.progress(allocation.role, index=allocation.index)
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return 0.0
