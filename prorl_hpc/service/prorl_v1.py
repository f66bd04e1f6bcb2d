"""The routes of NVIDIA's ProRL Agent Server, version 1, on top of jobs.

    POST /start /stop /process /cancel /add_llm_server /clear_llm_server   GET /status

`instance["data_source"]` names the task; the instance is number `index` of its training split, or
carries `messages` (or a `prompt`) and `answer` of its own. Time-outs of stages are the recipe's and
count no queueing. Errors: 400 malformed, 503 not started or no engine, 504 out of time.
"""

from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from prorl_hpc.inference.http_pool import HttpPool
from prorl_hpc.inference.prorl_server import ProrlServer
from prorl_hpc.service.core import Core, UnknownInstance
from prorl_hpc.service.jobs import Jobs
from prorl_hpc.service.schema import JobRequest, JobResult, JobState, Sample

WAIT_SECONDS = 24 * 3600.0


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


def add_routes(app: FastAPI, core: Core, jobs: Jobs) -> None:
    """Adds the routes to the service."""
    server = _Server(core, jobs)
    for path in ("start", "stop", "process", "cancel", "add_llm_server", "clear_llm_server"):
        app.add_api_route(f"/{path}", getattr(server, path), methods=["POST"])
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

    async def process(self, request: ProcessRequest) -> Response:
        if not self._started:
            return _error(503, "the server isn't started; POST /start first")
        try:
            wanted = job_request(request)
            self._core.check(wanted)
        except (ValueError, TypeError, UnknownInstance) as err:
            return _error(400, " ".join(str(err).split())[:500])
        stored = self._jobs.submit(wanted)
        name = request.job_id or stored.id
        self._names[name] = stored.id
        try:
            await self._jobs.wait(stored.id, seconds=WAIT_SECONDS)
        finally:
            self._names.pop(name, None)
            view = self._jobs.view(stored.id)
            if view is not None and not view.state.over:
                await self._jobs.cancel(stored.id)  # the client has gone
        data = self._jobs.result(stored.id)
        if data is None:
            return _error(503, "the job was cancelled")
        return process_answer(JobResult.model_validate_json(data), job_id=name)

    async def cancel(self, request: CancelRequest) -> Response:
        job_id = self._names.pop(request.job_id, None)
        if job_id is None:
            return _error(400, f"job {request.job_id[:100]!r} isn't running")
        await self._jobs.cancel(job_id)
        return JSONResponse({"status": "cancelled", "job_id": request.job_id})

    async def add_llm_server(self, request: ServerRequest) -> Response:
        pool = _pool(self._core)
        if pool is None:
            return _error(400, "this service runs an engine of its own; see serve --llm-servers")
        if not request.address.startswith(("http://", "https://")):
            return _error(400, f"address={request.address[:100]!r} must begin with http://")
        await pool.join(ProrlServer(request.address, version=pool.version))
        return JSONResponse({"status": "added", "llm_servers": list(pool.servers)})

    async def clear_llm_server(self) -> Response:
        pool = _pool(self._core)
        if pool is None:
            return _error(400, "this service runs an engine of its own")
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
        return _error(504 if late else 503, detail or f"job ended as {result.state}")
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
    messages: list[dict[str, Any]] = []
    start = 0
    while start < len(sample.tokens):
        if not sample.loss_mask[start]:
            start += 1
            continue
        end = start
        while end < len(sample.tokens) and sample.loss_mask[end]:
            end += 1
        messages.append(
            {
                "role": "assistant",
                "input_ids": sample.tokens[:start],
                "output_ids": sample.tokens[start:end],
                "logprobs": sample.logprobs[start:end],
            }
        )
        start = end
    return messages


def _pool(core: Core) -> HttpPool | None:
    return core.engine if isinstance(core.engine, HttpPool) else None


def _error(status: int, detail: str) -> Response:
    return JSONResponse({"error": detail, "detail": detail}, status_code=status)
