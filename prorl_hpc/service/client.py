"""Python client of the rollout service: a thin face of its HTTP routes, blocking, with retries.

Needs httpx alone; copy it or `pip install prorl-hpc`. Knows no torch.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx

from hpc.errors import HpcError

WAIT_SECONDS = 30.0
RETRY_SECONDS = 1.0


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
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if url.startswith("unix:"):
            transport = httpx.HTTPTransport(uds=url.removeprefix("unix:"))
            base = "http://service"
        else:
            transport = httpx.HTTPTransport()
            base = url
        self._http = httpx.Client(
            base_url=base, headers=headers, transport=transport, timeout=60.0, trust_env=False
        )
        self._patience_seconds = patience_seconds
        self._sleep = sleep

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def submit(self, *, idempotency_key: str | None = None, **request: Any) -> str:
        """Posts a job (fields of `JobRequest`) and returns its id."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return str(self._ask("POST", "/v1/jobs", json=request, headers=headers)["id"])

    def result(self, job_id: str, *, timeout_seconds: float = 3600.0) -> dict[str, Any]:
        """Waits for a job's result (fields of `JobResult`); raises TimeoutError."""
        until = time.monotonic() + timeout_seconds
        while (left := until - time.monotonic()) > 0:
            wait = {"wait_seconds": min(left, WAIT_SECONDS)}
            answer: dict[str, Any] = self._ask("GET", f"/v1/jobs/{job_id}/result", params=wait)
            if "samples" in answer:
                return answer
        raise TimeoutError(f"job {job_id} isn't over after {timeout_seconds:g} s")

    def rollouts(self, **request: Any) -> list[dict[str, Any]]:
        """Submits and waits: the usable samples."""
        result = self.result(self.submit(**request))
        return [sample for sample in result["samples"] if sample["reward"] is not None]

    def cancel(self, job_id: str) -> None:
        """Ends a job, or forgets its result."""
        self._ask("DELETE", f"/v1/jobs/{job_id}")

    def tasks(self) -> list[dict[str, Any]]:
        return list(self._ask("GET", "/v1/tasks"))

    def load_policy(self, version: int, *, path: Path) -> int:
        """Moves the service to a published policy; returns the version it now serves."""
        body = {"version": version, "path": str(path.resolve())}
        return int(self._ask("POST", "/v1/policy", json=body)["version"])

    def _ask(self, method: str, path: str, **more: Any) -> Any:
        until = time.monotonic() + self._patience_seconds
        while True:
            pause = RETRY_SECONDS
            try:
                response = self._http.request(method, path, **more)
            except httpx.TransportError as err:
                if time.monotonic() > until:
                    raise ServiceError(f"{method} {path}: {err}", status=0) from err
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
