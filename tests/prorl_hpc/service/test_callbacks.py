"""Callbacks: only at hosts that were named, a bounded number of times, never followed elsewhere."""

import json
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from prorl_hpc.service.allowed import CallbackError, check_host
from prorl_hpc.service.callbacks import ATTEMPTS, Callbacks
from tests.prorl_hpc.service.conftest import run, serving, until

JOB = {"task": "sums", "index": 3}


class Receiver(BaseHTTPRequestHandler):
    """Answers with the statuses it was given, in turn; the last one for ever."""

    statuses: list[int]
    bodies: list[Any]

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def receiver() -> Any:
    handler = type("Bound", (Receiver,), {"statuses": [200], "bodies": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler, server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_job_that_is_over_is_told_after_failures(directory: Path, receiver: Any) -> None:
    handler, port = receiver
    handler.statuses[:] = [500, 503, 204]

    async def check() -> None:
        async with serving(directory, callback_hosts=(f"127.0.0.1:{port}",)) as service:
            url = f"http://127.0.0.1:{port}/over?secret=1"
            posted = await service.post(JOB | {"callback_url": url, "num_samples": 2})
            assert posted.status_code == 201, posted.text
            await until(lambda: service.callbacks.counts["delivered"])
            expected = {"id": posted.json()["id"], "state": "done", "num_samples": 2,
                        "num_finished": 2, "num_usable": 2, "detail": ""}  # fmt: skip
            assert handler.bodies == [expected] * 3
            metrics = (await service.client.get("/metrics")).text
            assert 'prorl_callbacks_total{result="delivered"} 1\n' in metrics

    run(check())


@pytest.mark.parametrize("status", [302, 400])
def test_calls_end_and_redirects_are_not_followed(
    directory: Path, receiver: Any, status: int
) -> None:
    handler, port = receiver
    handler.statuses[:] = [status]

    async def check() -> None:
        async with serving(directory, callback_hosts=("127.0.0.1",)) as service:
            await service.post(JOB | {"callback_url": f"http://127.0.0.1:{port}/"})
            await until(lambda: service.callbacks.counts["failed"])
            assert len(handler.bodies) == ATTEMPTS

    run(check())


def test_nobody_listens_there(directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused

        async def check() -> None:
            async with serving(directory, callback_hosts=("127.0.0.1",)) as service:
                url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
                posted = await service.post(JOB | {"callback_url": url})
                await until(lambda: service.callbacks.counts["failed"])
                assert (await service.finished(posted.json()["id"]))["state"] == "done"

        run(check())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:8080/", "aren't allowed here"),
        ("http://169.254.169.254/latest", "aren't allowed here"),
        ("http://trainer:81/", "aren't allowed here"),
        ("http://trainer@evil/", "must be http"),
        ("http://evil/@trainer", "aren't allowed here"),
        ("file:///etc/passwd", "must be http"),
        ("unix:/run/x", "must be http"),
        ("http://trainer:99999/", "isn't a URL"),
    ],
)
def test_other_places_are_refused(directory: Path, url: str, words: str) -> None:
    async def check() -> None:
        async with serving(directory, callback_hosts=("trainer:80",)) as service:
            answer = await service.post(JOB | {"callback_url": url})
            assert answer.status_code == 400
            assert words in answer.json()["detail"]

    run(check())


def test_nothing_is_allowed_unless_named() -> None:
    with pytest.raises(CallbackError, match="--callback-host"):
        Callbacks().check("http://localhost/")
    Callbacks(["Trainer"]).check("https://trainer:444/x")
    Callbacks(["trainer:443"]).check("https://TRAINER/x")


@pytest.mark.parametrize("text", ["", "http://x", "a@b", "x:y", "x/y", "x:99999"])
def test_a_wrong_host_is_named(text: str) -> None:
    with pytest.raises(CallbackError, match="HOST"):
        check_host(text)
