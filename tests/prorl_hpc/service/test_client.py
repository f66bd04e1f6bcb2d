"""The Python client against a real service: every call, its types, its retries."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from prorl_hpc.service import client as face
from prorl_hpc.service import schema
from prorl_hpc.service.client import RolloutClient, ServiceError
from tests.prorl_hpc.service.conftest import TOKEN, run, serving


@pytest.mark.parametrize(
    ("typed", "model"),
    [
        (face.Message, schema.PostedMessage),
        (face.Job, schema.JobView),
        (face.Sample, schema.Sample),
        (face.Result, schema.JobResult),
        (face.Task, schema.TaskView),
    ],
)
def test_types_are_those_of_the_schema(typed: Any, model: Any) -> None:
    assert set(typed.__annotations__) == set(model.model_fields)


def test_submit_takes_every_field_of_a_request() -> None:
    import inspect

    taken = set(inspect.signature(RolloutClient.submit).parameters)
    flat = {"instance_id", "messages", "answer", "metadata"}
    assert flat == set(schema.PostedInstance.model_fields)
    wanted = (set(schema.JobRequest.model_fields) - {"instance"}) | flat | {"idempotency_key"}
    assert taken - {"self"} == wanted


def test_every_call(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory, over_tcp=True, token=TOKEN) as service:
            import asyncio

            await asyncio.to_thread(calls, service.url, directory)

    run(check())


def test_loading_a_policy_is_asked_once_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience: list[float] = []

    def request(method: str, path: str, **more: Any) -> httpx.Response:
        patience.append(more["timeout"].read)
        return httpx.Response(200, json={"version": 4})

    with RolloutClient("http://127.0.0.1:9") as client:
        monkeypatch.setattr(client._http, "request", request)
        assert client.load_policy(4, path=tmp_path) == 4
    assert patience == [face.LOAD_SECONDS]


def calls(url: str, directory: Path) -> None:
    with RolloutClient(url, token=TOKEN) as client:
        assert client.tasks() == [{"name": "sums", "train_size": 100, "validation_size": 100}]
        job_id = client.submit(task="sums", index=3, num_samples=2, min_usable=2, priority=1)
        result = client.result(job_id)
        assert [sample["reward"] for sample in result["samples"]] == [1.0, 1.0]
        assert client.job(job_id)["num_usable"] == 2
        assert [r["reward"] for r in client.gym_rollouts(job_id)] == [1.0, 1.0]
        assert client.cancel(job_id)["state"] == "done"  # forgotten
        with pytest.raises(ServiceError, match="unknown") as caught:
            client.job(job_id)
        assert caught.value.status == 404
        assert client.load_policy(4, path=directory) == 4
        assert client.policy_version() == 4
        mine = client.rollouts(
            task="sums", messages=[{"role": "user", "content": "hi"}], answer=None, index=None
        )
        assert len(mine) == 1
        assert client.submit(task="sums", index=1, idempotency_key="k") == client.submit(
            task="sums", index=1, idempotency_key="k"
        )
        with pytest.raises(TimeoutError):
            client.result("anything", timeout_seconds=0.0)


class Flaky(BaseHTTPRequestHandler):
    """Drops the connection after the request, is busy, then accepts."""

    keys: list[str | None]
    turns: list[str]

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.keys.append(self.headers["Idempotency-Key"])
        turn = self.turns.pop(0)
        if turn == "drop":
            self.close_connection = True
            return
        body = json.dumps({"id": "job-1", "detail": "busy"}).encode()
        self.send_response(429 if turn == "busy" else 201)
        if turn == "busy":
            self.send_header("Retry-After", "7")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_retry_has_the_same_key_and_waits_as_told() -> None:
    handler = type("Bound", (Flaky,), {"keys": [], "turns": ["drop", "busy", "accept"]})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    pauses: list[float] = []
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        with RolloutClient(url, sleep=pauses.append) as client:
            assert client.submit(task="sums", index=0) == "job-1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    (key,) = set(handler.keys)  # type: ignore[attr-defined]
    assert key
    assert pauses == [1.0, 7.0]


def test_a_service_that_moved_is_found_again(directory: Path, tmp_path: Path) -> None:
    where = tmp_path / "service"
    where.mkdir()
    (where / "service.json").write_text(json.dumps({"url": "http://127.0.0.1:1"}))
    (where / "token").write_text(TOKEN)

    def moves(url: str) -> None:
        client = RolloutClient.at(where)
        client._sleep = lambda _: None
        with client:
            (where / "service.json").write_text(json.dumps({"url": url}))
            assert client.tasks()[0]["name"] == "sums"

    async def check() -> None:
        import asyncio

        async with serving(directory, over_tcp=True, token=TOKEN) as service:
            await asyncio.to_thread(moves, service.url)

    run(check())


def test_no_service_at_all(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="no service in"):
        RolloutClient.at(tmp_path, patience_seconds=-1.0)
    with (
        RolloutClient("http://127.0.0.1:1", patience_seconds=-1.0) as client,
        pytest.raises(ServiceError) as caught,
    ):
        client.tasks()
    assert caught.value.status == 0
