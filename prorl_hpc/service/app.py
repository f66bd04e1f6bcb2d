"""The HTTP face of the rollout service, version 1. Translates; decides nothing.

    POST   /v1/jobs                 one instance, several samples   -> 201 (200: same key again)
    GET    /v1/jobs/{id}            state                            ?wait_seconds=
    GET    /v1/jobs/{id}/result     trajectories, 202 until then     ?wait_seconds= ?form=nemo_gym
    DELETE /v1/jobs/{id}            cancel, or forget a result
    GET    /v1/tasks   GET, POST /v1/policy   GET /health /metrics /openapi.json

Errors: 400 can't be run, 401 token, 404 unknown, 409 conflict, 413 body, 422 malformed, 429 busy
(with Retry-After), 503 the engine can't.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from prorl_hpc import __version__
from prorl_hpc.inference.engine import EngineError
from prorl_hpc.service.callbacks import Callbacks
from prorl_hpc.service.core import Core, UnknownInstance
from prorl_hpc.service.gate import Gate
from prorl_hpc.service.gym_form import gym_form
from prorl_hpc.service.jobs import Busy, Jobs, KeyTaken
from prorl_hpc.service.metrics import CONTENT_TYPE, prometheus
from prorl_hpc.service.prorl_v1 import PATHS as V1_PATHS
from prorl_hpc.service.prorl_v1 import add_routes, v1_error
from prorl_hpc.service.schema import (
    JobRequest,
    JobResult,
    JobState,
    JobView,
    PolicyRequest,
    PolicyView,
    Problem,
    TaskView,
)
from prorl_hpc.service.store import StoreError

MAX_BODY_BYTES = 16 << 20
MAX_WAIT_SECONDS = 300.0

_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": Problem} for code in (400, 401, 404, 409, 413, 422, 429, 503)
}
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS)]
Key = Annotated[str | None, Header(min_length=1, max_length=200)]


def make_app(
    core: Core,
    jobs: Jobs,
    *,
    callbacks: Callbacks,
    token: str | None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> ASGIApp:
    """The whole application; `jobs` and `callbacks` start and end with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        jobs.start()
        try:
            yield
        finally:
            await jobs.close()
            await callbacks.close()

    app = FastAPI(
        title="prorl-hpc rollout service",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    _add_errors(app)
    _add_jobs(app, core, jobs, callbacks)
    _add_results(app, core, jobs)
    _add_rest(app, core, jobs, callbacks)
    add_routes(app, core, jobs)
    return Gate(app, token=token, max_body_bytes=max_body_bytes)  # type: ignore[return-value]


def _add_errors(app: FastAPI) -> None:
    statuses: dict[type[Exception], int] = {
        UnknownInstance: 404,
        KeyTaken: 409,
        EngineError: 503,
        StoreError: 503,
    }

    async def answer(_: Request, err: Exception) -> Response:
        status = next(code for kind, code in statuses.items() if isinstance(err, kind))
        return JSONResponse({"detail": str(err)}, status_code=status)

    async def busy(_: Request, err: Exception) -> Response:
        assert isinstance(err, Busy)
        headers = {"Retry-After": str(err.retry_seconds)}
        return JSONResponse({"detail": str(err)}, status_code=429, headers=headers)

    async def malformed(request: Request, err: Exception) -> Response:
        # Without the input itself: it may be anything, and not even text.
        assert isinstance(err, RequestValidationError)
        found = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in err.errors()]
        detail = "; ".join(found)[:2000]
        if request.url.path in V1_PATHS:
            return v1_error(400, detail)
        return _problem(422, detail)

    async def plain(request: Request, err: Exception) -> Response:
        # A body that isn't text at all, an unknown route, a wrong method.
        assert isinstance(err, HTTPException)
        make = v1_error if request.url.path in V1_PATHS else _problem
        response = make(err.status_code, str(err.detail))
        response.headers.update(err.headers or {})
        return response

    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, plain)
    for kind in statuses:
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(Busy, busy)


def _add_jobs(app: FastAPI, core: Core, jobs: Jobs, callbacks: Callbacks) -> None:
    @app.post("/v1/jobs", status_code=201, response_model=JobView, responses=_ERRORS)
    async def submit(
        request: JobRequest, response: Response, idempotency_key: Key = None
    ) -> JobView | Response:
        try:
            await asyncio.to_thread(core.check, request)
            if request.callback_url is not None:
                callbacks.check(request.callback_url)
        except ValueError as err:
            return _problem(400, str(err))
        stored = jobs.submit(request, idempotency_key=idempotency_key)
        view = jobs.view(stored.id)
        if view is None:
            return _problem(404, "the job was removed")
        if stored.state is not JobState.queued:
            response.status_code = 200
        return view

    @app.delete("/v1/jobs/{job_id}", response_model=JobView, responses=_ERRORS)
    async def cancel(job_id: str) -> JobView | Response:
        before = jobs.view(job_id)
        if before is None:
            return _unknown(job_id)
        await jobs.cancel(job_id)
        return jobs.view(job_id) or before


def _add_results(app: FastAPI, core: Core, jobs: Jobs) -> None:
    @app.get("/v1/jobs/{job_id}", response_model=JobView, responses=_ERRORS)
    async def look(job_id: str, wait_seconds: Wait = 0.0) -> JobView | Response:
        await jobs.wait(job_id, seconds=wait_seconds)
        return jobs.view(job_id) or _unknown(job_id)

    @app.get(
        "/v1/jobs/{job_id}/result",
        response_model=JobResult,
        responses=_ERRORS | {202: {"model": JobView}},
    )
    async def result(
        job_id: str, wait_seconds: Wait = 0.0, form: Literal["plain", "nemo_gym"] = "plain"
    ) -> Response:
        await jobs.wait(job_id, seconds=wait_seconds)
        view = jobs.view(job_id)
        if view is None:
            return _unknown(job_id)
        if not view.state.over:
            return JSONResponse(view.model_dump(mode="json"), status_code=202)
        data = jobs.result(job_id)
        if form == "plain" or data is None:
            return Response(data, media_type="application/json")
        gym = gym_form(JobResult.model_validate_json(data), text=core.text)
        return JSONResponse(gym)


def _add_rest(app: FastAPI, core: Core, jobs: Jobs, callbacks: Callbacks) -> None:
    @app.get("/v1/tasks", response_model=list[TaskView])
    async def tasks() -> list[TaskView]:
        return await asyncio.to_thread(core.tasks)

    @app.get("/v1/policy", response_model=PolicyView)
    async def policy() -> PolicyView:
        return PolicyView(version=core.engine.version)

    @app.post("/v1/policy", response_model=PolicyView, responses=_ERRORS)
    async def load(request: PolicyRequest) -> PolicyView | Response:
        try:
            await core.load(request.version, path=Path(request.path))
        except ValueError as err:
            return _problem(400, str(err))
        return PolicyView(version=core.engine.version)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        text = prometheus(
            jobs,
            policy_version=core.engine.version,
            occupied=core.occupied,
            callbacks=callbacks.counts,
        )
        return Response(text, media_type=CONTENT_TYPE)


def _problem(status: int, detail: str) -> Response:
    return JSONResponse({"detail": detail}, status_code=status)


def _unknown(job_id: str) -> Response:
    return _problem(404, f"job {job_id[:100]!r} is unknown; its result may have been swept")
