"""A service around a real pipeline; engine and task are small fakes with the real faces."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from prorl_hpc.inference.engine import Completion, Sampling
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.run import Run
from prorl_hpc.service.app import make_app
from prorl_hpc.service.core import Core
from prorl_hpc.service.jobs import Bounds, Jobs
from prorl_hpc.service.store import JobStore
from tests.prorl_hpc.rollout.helpers import make_pipeline, make_tokenizer

TOKEN = "a token"


class HeldEngine(ScriptedEngine):
    """A scripted engine that can be held back; counts what is in flight."""

    def __init__(self, answers: Any) -> None:
        super().__init__(make_tokenizer(), answers)
        self.gate = asyncio.Event()
        self.gate.set()
        self.in_flight = 0
        self.order: list[str] = []

    async def generate(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> Completion:
        self.in_flight += 1
        self.order.append(affinity)
        try:
            await self.gate.wait()
            return await super().generate(prompt_ids, sampling=sampling, affinity=affinity)
        finally:
            self.in_flight -= 1


class Service:
    """What a test holds: a client of the application, and its insides."""

    def __init__(self, client: httpx.AsyncClient, engine: Any, jobs: Jobs) -> None:
        self.client = client
        self.engine = engine
        self.jobs = jobs

    async def post(self, body: Any, **more: Any) -> httpx.Response:
        return await self.client.post("/v1/jobs", json=body, **more)

    async def finished(self, job_id: str) -> Any:
        response = await self.client.get(f"/v1/jobs/{job_id}/result?wait_seconds=60")
        assert response.status_code == 200, response.text
        return response.json()


@asynccontextmanager
async def serving(
    directory: Path, *, engine: Any = None, token: str | None = None, max_body_bytes: int = 1 << 20,
    **bounds: Any,
) -> AsyncIterator[Service]:  # fmt: skip
    """The application without a socket, its lifespan included."""
    engine = engine or HeldEngine(lambda ids, affinity: "3")
    pipeline = make_pipeline(engine, run=Run(directory / "run"))
    core = Core(pipeline._parts)
    store = JobStore(directory / "jobs.sqlite")
    jobs = Jobs(store, produce=core.produce, bounds=Bounds(**({"capacity": 8} | bounds)))
    app: Any = make_app(core, jobs, token=token, max_body_bytes=max_body_bytes)
    transport = httpx.ASGITransport(app=app)
    jobs.start()
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            yield Service(client, engine, jobs)
    finally:
        await jobs.close()
        store.close()


def run(test: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(300):
            await test

    asyncio.run(bounded())


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path
