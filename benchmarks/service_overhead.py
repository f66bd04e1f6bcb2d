"""What the HTTP service adds to a rollout: the bare pipeline, jobs without HTTP, jobs over HTTP.

The engine answers at once with a text of a given length, so that what is left is our own work; the
bare pipeline is the limit. Prints one table: rollouts per second and what each way adds to one.

    python benchmarks/service_overhead.py [--rollouts 400] [--tokens 500]
"""

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from prorl_hpc.agents.characters import build_character_tokenizer
from prorl_hpc.agents.registry import make_agent
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.recipe import ModelConfig, Recipe, RolloutConfig, TaskConfig
from prorl_hpc.records import Instance, Kind, Lease, Message, Score
from prorl_hpc.rollout.pipeline import Parts, Pipeline
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.run import Run
from prorl_hpc.service.app import make_app
from prorl_hpc.service.callbacks import Callbacks
from prorl_hpc.service.core import Core
from prorl_hpc.service.job import Where
from prorl_hpc.service.jobs import Bounds, Jobs
from prorl_hpc.service.schema import JobRequest
from prorl_hpc.service.serve import listening, make_server
from prorl_hpc.service.store import JobStore

CONCURRENT = 32
SAMPLES = 8
"""Rollouts of one job."""

TASK = "echo"


class Echo:
    """Asks one thing; scores nothing."""

    name = TASK

    def size(self, kind: Kind) -> int:  # noqa: ARG002
        return 1

    def instance(self, index: int, *, kind: Kind) -> Instance:  # noqa: ARG002
        messages = (Message(role="user", content="say it"),)
        return Instance(task=TASK, instance_id="echo", index=index, messages=messages)

    def score(self, instance: Instance, response: str) -> Score:  # noqa: ARG002
        return Score(reward=1.0)


class AtOnce:
    """Scores without a process."""

    async def score(self, request: Any, *, timeout_seconds: float) -> Score:  # noqa: ARG002
        return Score(reward=1.0)


def make_parts(directory: Path, *, num_tokens: int) -> Parts:
    tokenizer = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz <>\n")
    recipe = Recipe(
        name="overhead",
        steps=1,
        tasks={TASK: TaskConfig(kind="logic")},
        model=ModelConfig(context_tokens=4 * num_tokens + 100),
        rollout=RolloutConfig(
            max_new_tokens=2 * num_tokens, init_workers=CONCURRENT, run_workers=CONCURRENT,
            eval_workers=CONCURRENT,
        ),
    )  # fmt: skip
    engine = ScriptedEngine(tokenizer, lambda *_: "a" * num_tokens)
    return Parts(
        recipe=recipe,
        tasks={TASK: Echo()},
        agents={TASK: make_agent(recipe.tasks[TASK], tokenizer=tokenizer)},
        tokenizer=tokenizer,
        engine=engine,
        versions=Versions(engine, run=Run(directory)),
        scorer=AtOnce(),
        make_environment=None,
        worker="bench",
        attempt=1,
    )


def lease(number: int) -> Lease:
    return Lease(
        lease_id=number, group_id=number, kind=Kind.train, task=TASK, instance_index=0,
        rollouts=tuple(range(SAMPLES)), num_rollouts=SAMPLES, seed=0, policy_version=None,
        deadline_seconds=600.0,
    )  # fmt: skip


async def bounded(one: Callable[[int], Awaitable[Any]], number: int, *, at_once: int) -> float:
    """Seconds for `number` calls, so many at once."""
    gate = asyncio.Semaphore(at_once)

    async def call(index: int) -> None:
        async with gate:
            await one(index)

    started = time.perf_counter()
    await asyncio.gather(*(call(index) for index in range(number)))
    return time.perf_counter() - started


async def measure(directory: Path, *, num_rollouts: int, num_tokens: int) -> dict[str, float]:
    parts = make_parts(directory, num_tokens=num_tokens)
    num_jobs = num_rollouts // SAMPLES
    at_once = CONCURRENT // SAMPLES
    pipeline, core = Pipeline(parts), Core(parts)
    request = JobRequest(task=TASK, index=0, num_samples=SAMPLES)
    seconds: dict[str, float] = {}

    async def bare(index: int) -> None:
        await asyncio.gather(*(pipeline.produce(lease(index), n) for n in range(SAMPLES)))

    await bounded(bare, at_once, at_once=at_once)  # warm
    seconds["bare pipeline"] = await bounded(bare, num_jobs, at_once=at_once)

    store = JobStore(directory / "jobs.sqlite")
    jobs = Jobs(store, produce=core.produce, bounds=Bounds(capacity=CONCURRENT))
    jobs.start()

    async def job(_: int) -> None:
        stored = jobs.submit(request)
        await jobs.wait(stored.id, seconds=600)
        assert jobs.result(stored.id) is not None

    seconds["jobs, durable results"] = await bounded(job, num_jobs, at_once=at_once)
    await jobs.close()
    jobs = Jobs(store, produce=core.produce, bounds=Bounds(capacity=CONCURRENT))
    server = make_server(make_app(core, jobs, callbacks=Callbacks(), token="t"))
    where = Where(directory=directory, policy=directory)
    with listening(where) as (listener, url):
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            seconds["service over HTTP"] = await over_http(url, num_jobs, at_once=at_once)
        finally:
            server.leave()
            await task
    store.close()
    return seconds


async def over_http(url: str, num_jobs: int, *, at_once: int) -> float:
    import httpx

    headers = {"Authorization": "Bearer t"}
    body = {"task": TASK, "index": 0, "num_samples": SAMPLES}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600.0) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                await client.get("/health")
                break

        async def job(_: int) -> None:
            posted = (await client.post("/v1/jobs", json=body)).json()
            path = f"/v1/jobs/{posted['id']}/result?wait_seconds=300"
            result = (await client.get(path)).json()
            assert len(result["samples"]) == SAMPLES

        return await bounded(job, num_jobs, at_once=at_once)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=500, help="of each answer")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        seconds = asyncio.run(
            measure(Path(scratch), num_rollouts=given.rollouts, num_tokens=given.tokens)
        )
    count = given.rollouts // SAMPLES * SAMPLES
    base = seconds["bare pipeline"]
    print(f"{count} rollouts of {given.tokens} tokens, {SAMPLES} a job, {CONCURRENT} at once; ")
    print("client and server share one event loop\n")
    print(f"{'way':24} {'rollouts/s':>10} {'ms each':>9} {'added ms':>9}")
    for name, spent in seconds.items():
        added = (spent - base) / count * 1000
        print(f"{name:24} {count / spent:10.0f} {spent / count * 1000:9.2f} {added:9.2f}")


if __name__ == "__main__":
    main()
