"""A service around a real pipeline; engine and task are small fakes with the real faces."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from prorl_hpc.inference.engine import Completion, Sampling
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.run import Run
from prorl_hpc.service.app import make_app
from prorl_hpc.service.callbacks import Callbacks
from prorl_hpc.service.core import Core
from prorl_hpc.service.job import Where
from prorl_hpc.service.jobs import Bounds, Jobs
from prorl_hpc.service.serve import listening, make_server
from prorl_hpc.service.store import JobStore
from tests.prorl_hpc.rollout.helpers import make_pipeline, make_tokenizer

TOKEN = "a token"


class HeldEngine(ScriptedEngine):
    """A scripted engine that can be held back; counts what is in flight."""

    def __init__(self, answers: Any, *, tokenizer: Any = None) -> None:
        super().__init__(tokenizer or make_tokenizer(), answers)
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

    def __init__(
        self, client: httpx.AsyncClient, engine: Any, jobs: Jobs, callbacks: Callbacks, url: str
    ) -> None:
        self.client = client
        self.engine = engine
        self.jobs = jobs
        self.callbacks = callbacks
        self.url = url

    async def post(self, body: Any, **more: Any) -> httpx.Response:
        return await self.client.post("/v1/jobs", json=body, **more)

    async def finished(self, job_id: str) -> Any:
        response = await self.client.get(f"/v1/jobs/{job_id}/result?wait_seconds=60")
        assert response.status_code == 200, response.text
        return response.json()


@asynccontextmanager
async def serving(
    directory: Path,
    *,
    engine: Any = None,
    token: str | None = None,
    max_body_bytes: int = 1 << 20,
    over_tcp: bool = False,
    callback_hosts: tuple[str, ...] = (),
    pipeline: dict[str, Any] | None = None,
    **bounds: Any,
) -> AsyncIterator[Service]:
    """The application with its lifespan: without a socket, or behind a real one."""
    engine = engine or HeldEngine(lambda ids, affinity: "3")
    made = make_pipeline(engine, run=Run(directory / "run"), **(pipeline or {}))
    core = Core(made._parts)
    store = JobStore(directory / "jobs.sqlite")
    callbacks = Callbacks(callback_hosts, first_pause_seconds=0.01)
    jobs = Jobs(
        store,
        produce=core.produce,
        bounds=Bounds(**({"capacity": 8} | bounds)),
        notify=callbacks.notify,
    )
    app: Any = make_app(core, jobs, callbacks=callbacks, token=token, max_body_bytes=max_body_bytes)
    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        if over_tcp:
            where = Where(directory=directory, policy=directory)
            listener, url = stack.enter_context(listening(where))
            await stack.enter_async_context(running(make_server(app), listener))
            transport: Any = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None))
        else:
            jobs.start()
            stack.push_async_callback(callbacks.close)
            stack.push_async_callback(jobs.close)
            transport, url = httpx.ASGITransport(app=app), "http://service"
        client = httpx.AsyncClient(transport=transport, base_url=url, timeout=120.0)
        async with client:
            yield Service(client, engine, jobs, callbacks, url)


@asynccontextmanager
async def running(server: Any, listener: socket.socket) -> AsyncIterator[None]:
    """A real server in this event loop."""
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started or task.done())
        yield
    finally:
        server.leave()
        await task


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
