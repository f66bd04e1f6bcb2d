"""Python client of the rollout service: its HTTP routes, blocking, typed, with retries.

Needs httpx alone; copy it or `pip install prorl-hpc`. Knows no torch. Field by field the types are
those of `prorl_hpc.service.schema`, which say what they mean.
"""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, cast

import httpx

from hpc.errors import HpcError

WAIT_SECONDS = 30.0
REQUEST_SECONDS = 60.0
LOAD_SECONDS = 3600.0
"""A large policy takes its time, and asking again would load it again."""

RETRY_SECONDS = 1.0


class Message(TypedDict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Job(TypedDict):
    """A job's state: `queued`, `running`, `done`, `failed` or `cancelled`."""

    id: str
    state: str
    num_samples: int
    num_finished: int
    num_usable: int
    detail: str


class Sample(TypedDict):
    """One trajectory; `tokens`, `loss_mask`, `logprobs` and `versions` have the same length."""

    sample: int
    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int]
    reward: float | None
    components: dict[str, float]
    outcome: str
    finish_reason: str
    timings: dict[str, float]
    isolation: dict[str, str]
    detail: str


class Result(TypedDict):
    id: str
    state: str
    task: str
    instance_id: str
    samples: list[Sample]
    detail: str


class Task(TypedDict):
    name: str
    train_size: int
    validation_size: int


class ServiceError(HpcError, RuntimeError):
    """The service refused; `status` is the HTTP status, 0 when it couldn't be reached."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class RolloutClient:
    """One service. Use it as `with`."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        patience_seconds: float = 300.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`url` is `http://host:port` or `unix:/path`. Refused connections and busy answers are
        tried again for `patience_seconds`."""
        self._patience_seconds = patience_seconds
        self._sleep = sleep
        self._directory: Path | None = None
        self._url = url
        self._http = _connect(url, token)

    @classmethod
    def at(cls, directory: Path, *, patience_seconds: float = 300.0) -> Self:
        """The service of this directory, wherever it runs: a job of a cluster that starts again on
        another node is found there. Raises ServiceError when it hasn't started in time."""
        until = time.monotonic() + patience_seconds
        while True:
            try:
                url, token = _address(directory)
                break
            except (OSError, ValueError, KeyError) as err:
                if time.monotonic() > until:
                    raise ServiceError(f"no service in {directory}: {err}", status=0) from err
                time.sleep(RETRY_SECONDS)
        client = cls(url, token=token, patience_seconds=patience_seconds)
        client._directory = directory
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(
        self,
        *,
        task: str,
        index: int | None = None,
        instance_id: str = "posted",
        messages: Sequence[Message] = (),
        answer: Any = None,
        metadata: Mapping[str, Any] | None = None,
        kind: Literal["train", "validation"] = "train",
        num_samples: int = 1,
        min_usable: int | None = None,
        priority: int = 0,
        deadline_seconds: float | None = None,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
        callback_url: str | None = None,
        idempotency_key: str | None = None,
    ) -> str:
        """Posts a job at instance `index`, or at one of your own (`messages`, `answer`); its id.

        Without an `idempotency_key` one is made, so that a retry never posts a job twice.
        """
        request: dict[str, Any] = {
            "task": task,
            "index": index,
            "kind": kind,
            "num_samples": num_samples,
            "min_usable": min_usable,
            "priority": priority,
            "deadline_seconds": deadline_seconds,
            "temperature": temperature,
            "max_new_tokens": max_new_tokens,
            "seed": seed,
            "callback_url": callback_url,
        }
        if messages:
            request["instance"] = {
                "instance_id": instance_id,
                "messages": list(messages),
                "answer": answer,
                "metadata": dict(metadata or {}),
            }
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return str(self._ask("POST", "/v1/jobs", json=request, headers=headers)["id"])

    def job(self, job_id: str, *, wait_seconds: float = 0.0) -> Job:
        """The job's state; waits so long for its end."""
        wait = {"wait_seconds": wait_seconds}
        return cast("Job", self._ask("GET", f"/v1/jobs/{job_id}", params=wait))

    def result(self, job_id: str, *, timeout_seconds: float = 3600.0) -> Result:
        """Waits for a job's result; raises TimeoutError."""
        return cast("Result", self._result(job_id, timeout_seconds=timeout_seconds))

    def gym_rollouts(self, job_id: str, *, timeout_seconds: float = 3600.0) -> list[dict[str, Any]]:
        """The result with NeMo Gym's names: `response.output` items that carry
        `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`, and `reward`."""
        answer = self._result(job_id, timeout_seconds=timeout_seconds, form="nemo_gym")
        return list(answer["rollouts"])

    def rollouts(self, **request: Any) -> list[Sample]:
        """Submits (the arguments of `submit`) and waits: the usable samples."""
        result = self.result(self.submit(**request))
        return [sample for sample in result["samples"] if sample["reward"] is not None]

    def cancel(self, job_id: str) -> Job:
        """Ends a job, or forgets its result."""
        return cast("Job", self._ask("DELETE", f"/v1/jobs/{job_id}"))

    def tasks(self) -> list[Task]:
        return cast("list[Task]", self._ask("GET", "/v1/tasks"))

    def policy_version(self) -> int:
        """The version that new tokens come from."""
        return int(self._ask("GET", "/v1/policy")["version"])

    def load_policy(self, version: int, *, path: Path) -> int:
        """Moves the service to a published policy; returns the version it now serves."""
        body = {"version": version, "path": str(path.resolve())}
        timeout = httpx.Timeout(LOAD_SECONDS, connect=REQUEST_SECONDS)
        return int(self._ask("POST", "/v1/policy", json=body, timeout=timeout)["version"])

    def _result(self, job_id: str, *, timeout_seconds: float, form: str = "plain") -> Any:
        until = time.monotonic() + timeout_seconds
        while (left := until - time.monotonic()) > 0:
            params = {"wait_seconds": min(left, WAIT_SECONDS), "form": form}
            answer = self._ask("GET", f"/v1/jobs/{job_id}/result", params=params)
            if "num_finished" not in answer:  # else the job's state
                return answer
        raise TimeoutError(f"job {job_id} isn't over after {timeout_seconds:g} s")

    def _ask(self, method: str, path: str, **more: Any) -> Any:
        until = time.monotonic() + self._patience_seconds
        while True:
            pause = RETRY_SECONDS
            try:
                response = self._http.request(method, path, **more)
            except httpx.TransportError as err:
                if time.monotonic() > until:
                    raise ServiceError(f"{method} {path}: {err}", status=0) from err
                self._find_again()
            else:
                if response.status_code < 400:
                    return response.json()
                if response.status_code != 429 or time.monotonic() > until:
                    raise ServiceError(
                        f"{method} {path} answered {response.status_code}: {response.text[:500]}",
                        status=response.status_code,
                    )
                pause = float(response.headers.get("Retry-After", RETRY_SECONDS))
            self._sleep(pause)

    def _find_again(self) -> None:
        if self._directory is None:
            return
        try:
            url, token = _address(self._directory)
        except (OSError, ValueError, KeyError):
            return
        if url != self._url:
            self._http.close()
            self._url, self._http = url, _connect(url, token)


def _address(directory: Path) -> tuple[str, str | None]:
    url = str(json.loads((directory / "service.json").read_text())["url"])
    token = directory / "token"
    return url, token.read_text().strip() if token.is_file() else None


def _connect(url: str, token: str | None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if url.startswith("unix:"):
        transport = httpx.HTTPTransport(uds=url.removeprefix("unix:"))
        base = "http://service"
    else:
        transport = httpx.HTTPTransport()
        base = url
    return httpx.Client(
        base_url=base, headers=headers, transport=transport, timeout=REQUEST_SECONDS,
        trust_env=False,
    )  # fmt: skip
