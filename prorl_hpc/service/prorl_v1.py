"""The routes of NVIDIA's ProRL Agent Server, version 1, on top of jobs.

    POST /start /stop /process /cancel /add_llm_server /clear_llm_server   GET /status

`instance["data_source"]` names the task; the instance is number `index` of its training split, or
carries `messages` (or a `prompt`) and `answer` of its own. Time-outs of stages are the recipe's and
count no queueing. Errors: 400 malformed, 503 not started or no engine, 504 out of time.
"""

import asyncio
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from prorl_hpc.agents.turns import turns_of
from prorl_hpc.inference.http_pool import HttpPool
from prorl_hpc.inference.prorl_server import ProrlServer
from prorl_hpc.service.core import Core, UnknownInstance
from prorl_hpc.service.jobs import Busy, Jobs
from prorl_hpc.service.schema import JobRequest, JobResult, JobState, Sample

WAIT_SECONDS = 24 * 3600.0

_POSTS = ("start", "stop", "process", "cancel", "add_llm_server", "clear_llm_server")
PATHS = frozenset(f"/{name}" for name in (*_POSTS, "status"))
"""What v1 clients ask; their errors have v1's statuses."""


class ProcessRequest(BaseModel):
    """One rollout; the answer is its result."""

    model_config = ConfigDict(extra="allow")
    instance: dict[str, Any]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    job_id: str | None = Field(default=None, min_length=1, max_length=180)


class CancelRequest(BaseModel):
    job_id: str


class ServerRequest(BaseModel):
    address: str = Field(min_length=1, max_length=500)


class Refused(BaseModel):
    """Every error's body."""

    error: str
    detail: str


_ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": Refused} for code in (400, 401, 413, 503, 504)
}


def add_routes(app: FastAPI, core: Core, jobs: Jobs) -> None:
    """Adds the routes to the service."""
    server = _Server(core, jobs)
    for name in _POSTS:
        app.add_api_route(f"/{name}", getattr(server, name), methods=["POST"], responses=_ERRORS)
    app.add_api_route("/status", server.status, methods=["GET"])


class _Server:
    """The state that v1 has and jobs haven't: started or not, and the clients' names of jobs."""

    def __init__(self, core: Core, jobs: Jobs) -> None:
        self._core = core
        self._jobs = jobs
        self._started = False
        self._names: dict[str, str] = {}

    async def start(self) -> dict[str, str]:
        self._started = True
        return {"status": "started"}

    async def stop(self) -> dict[str, str]:
        self._started = False
        for job_id in list(self._names.values()):
            await self._jobs.cancel(job_id)
        self._names.clear()
        return {"status": "stopped"}

    async def status(self) -> dict[str, Any]:
        return {
            "running": self._started,
            "queued": self._jobs.num_queued,
            "active": self._jobs.num_samples_running,
            "stages": self._core.occupied,
            "llm_servers": list(pool.servers) if (pool := _pool(self._core)) else [],
        }

    async def process(self, wanted: ProcessRequest, request: Request) -> Response:
        if not self._started:
            return v1_error(503, "the server isn't started; POST /start first")
        if wanted.job_id in self._names:
            return v1_error(400, f"job {wanted.job_id!r} is running already; choose another job_id")
        try:
            job = job_request(wanted)
            self._core.check(job)
        except (ValueError, TypeError, UnknownInstance) as err:
            return v1_error(400, " ".join(str(err).split())[:500])
        try:
            stored = self._jobs.submit(job)
        except Busy as err:
            return v1_error(503, str(err), retry_seconds=err.retry_seconds)
        name = wanted.job_id or stored.id
        self._names[name] = stored.id
        try:
            await self._until_over_or_gone(stored.id, request)
        finally:
            if self._names.get(name) == stored.id:
                del self._names[name]
            view = self._jobs.view(stored.id)
            if view is not None and not view.state.over:
                await self._jobs.cancel(stored.id)  # nobody else can ask for its result
        data = self._jobs.result(stored.id)
        if data is None:
            return v1_error(503, "the job was cancelled")
        return process_answer(JobResult.model_validate_json(data), job_id=name)

    async def _until_over_or_gone(self, job_id: str, request: Request) -> None:
        """Returns when the job is over, or its client has hung up."""
        waiting = asyncio.create_task(self._jobs.wait(job_id, seconds=WAIT_SECONDS))
        gone = asyncio.create_task(_gone(request))
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            gone.cancel()
            await asyncio.gather(waiting, gone, return_exceptions=True)

    async def cancel(self, request: CancelRequest) -> Response:
        job_id = self._names.pop(request.job_id, None)
        if job_id is None:
            return v1_error(400, f"job {request.job_id[:100]!r} isn't running")
        await self._jobs.cancel(job_id)
        return JSONResponse({"status": "cancelled", "job_id": request.job_id})

    async def add_llm_server(self, request: ServerRequest) -> Response:
        pool = _pool(self._core)
        if pool is None:
            return v1_error(400, "this service runs an engine of its own; see serve --llm-servers")
        if not request.address.startswith(("http://", "https://")):
            return v1_error(400, f"address={request.address[:100]!r} must begin with http://")
        address = request.address.rstrip("/")
        if address not in pool.servers:
            await pool.leave(address)  # one that was drained: its connections are let go
            await pool.join(ProrlServer(address, version=pool.version))
        return JSONResponse({"status": "added", "llm_servers": list(pool.servers)})

    async def clear_llm_server(self) -> Response:
        pool = _pool(self._core)
        if pool is None:
            return v1_error(400, "this service runs an engine of its own")
        for address in pool.servers:
            await pool.leave(address)
        return JSONResponse({"status": "cleared"})


def job_request(request: ProcessRequest) -> JobRequest:
    """A v1 request as a job. Raises ValueError."""
    instance, sampling = request.instance, request.sampling_params
    if sampling.get("top_p", 1.0) != 1.0 or sampling.get("top_k", -1) not in (-1, 0):
        raise ValueError("top_p and top_k change the distribution that is trained on; leave them")
    fields: dict[str, Any] = {"task": instance.get("data_source")}
    messages = instance.get("messages") or instance.get("prompt")
    if messages:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        fields["instance"] = {
            "instance_id": str(instance.get("instance_id", "posted")),
            "messages": messages,
            "answer": instance.get("answer"),
            "metadata": instance.get("metadata") or {},
        }
    else:
        fields["index"] = instance.get("index")
    fields["temperature"] = sampling.get("temperature")
    fields["max_new_tokens"] = sampling.get("max_new_tokens", sampling.get("max_tokens"))
    fields["seed"] = sampling.get("seed") or 0
    return JobRequest.model_validate(fields)


def process_answer(result: JobResult, *, job_id: str) -> Response:
    """The result in v1 form; 504 out of time, 503 for a failure that isn't the agent's."""
    sample = result.samples[0] if result.samples else None
    if sample is None or sample.reward is None:
        late = "deadline" in result.detail or "within" in (sample.detail if sample else "")
        detail = sample.detail if sample else result.detail
        return v1_error(504 if late else 503, detail or f"job ended as {result.state}")
    return JSONResponse(
        {
            "job_id": job_id,
            "instance_id": result.instance_id,
            "success": result.state is JobState.done,
            "reward": sample.reward,
            "outcome": sample.outcome,
            "finish_reason": sample.finish_reason,
            "messages": messages_of(sample),
            "timings": sample.timings,
        }
    )


def messages_of(sample: Sample) -> list[dict[str, Any]]:
    """Each answer with the ids before it, its own ids and their log-probabilities."""
    turns = turns_of(sample.tokens, loss_mask=sample.loss_mask, logprobs=sample.logprobs)
    return [
        {
            "role": "assistant",
            "input_ids": turn.prompt_ids,
            "output_ids": turn.answer_ids,
            "logprobs": turn.logprobs,
        }
        for turn in turns
    ]


def _pool(core: Core) -> HttpPool | None:
    return core.engine if isinstance(core.engine, HttpPool) else None


def v1_error(status: int, detail: str, *, retry_seconds: int | None = None) -> Response:
    """An error in v1's form."""
    headers = {} if retry_seconds is None else {"Retry-After": str(retry_seconds)}
    return JSONResponse({"error": detail, "detail": detail}, status_code=status, headers=headers)


async def _gone(request: Request) -> None:
    """Returns once the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
