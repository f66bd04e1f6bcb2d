"""Cancelling at every stage of an attempt frees its environments and its requests."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.records import Score
from tests.fakes.environments import FakeEnvironment, ShellTask
from tests.prorl_hpc.agents.templates import byte_tokenizer
from tests.prorl_hpc.service.conftest import HeldEngine, run, serving, until


class Stalling(FakeEnvironment):
    """Never gets ready."""

    async def start(self) -> None:
        await asyncio.Event().wait()

    async def __aenter__(self) -> Any:
        try:
            return await super().__aenter__()
        except BaseException:
            await self.close()
            raise


class Scoring(ShellTask):
    """Never has scored."""

    async def score_in(self, instance: Any, **more: Any) -> Score:
        async with more["make_environment"](self.environment_spec(instance)):
            await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("stage", ["queue", "init", "run", "eval"])
def test_cancelling_frees_everything(directory: Path, stage: str) -> None:
    made: list[FakeEnvironment] = []
    kind = Stalling if stage == "init" else FakeEnvironment

    def make(_spec: Any) -> FakeEnvironment:
        made.append(kind())
        return made[-1]

    async def check() -> None:
        tokenizer = byte_tokenizer()
        submit = "```bash\nsubmit\n```"
        engine = HeldEngine(lambda ids, affinity: submit, tokenizer=tokenizer)
        pipeline = {"task": Scoring(), "make_environment": make, "recipe": recipe(),
                    "tokenizer": tokenizer}  # fmt: skip
        async with serving(directory, engine=engine, pipeline=pipeline, capacity=1) as service:
            if stage in ("run", "queue"):
                engine.gate.clear()
            first = (await service.post({"task": "sums", "index": 1})).json()["id"]
            job_id = first
            if stage == "queue":
                await until(lambda: engine.in_flight == 1)
                job_id = (await service.post({"task": "sums", "index": 1})).json()["id"]
            else:
                metric = f'prorl_stage_occupied{{stage="{stage}"}} 1'
                await until_shown(service, metric)
            answer = await service.client.delete(f"/v1/jobs/{job_id}")
            assert answer.json()["state"] == "cancelled"
            if stage == "queue":
                await service.client.delete(f"/v1/jobs/{first}")
            assert all(environment.closed for environment in made)
            assert engine.in_flight == 0
            assert service.jobs.num_samples_running == 0
            assert (await service.finished(job_id))["samples"] == []

    run(check())


async def until_shown(service: Any, text: str) -> None:
    while text not in (await service.client.get("/metrics")).text:
        await asyncio.sleep(0.01)


def recipe() -> Any:
    from dataclasses import replace

    from prorl_hpc.choices import AgentKind, EnvironmentKind
    from tests.prorl_hpc.rollout.helpers import make_recipe

    made = make_recipe(max_new_tokens=60)
    task = replace(
        made.tasks["sums"],
        agent=AgentKind.bash,
        environment=EnvironmentKind.process,
        max_turns=3,
    )
    return replace(made, tasks={"sums": task}, model=replace(made.model, context_tokens=2000))
