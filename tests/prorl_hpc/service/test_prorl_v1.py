"""A client of ProRL Agent Server v1, unchanged, against our service and against its LLM servers."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from prorl_hpc.inference.http_pool import HttpPool
from tests.prorl_hpc.service.conftest import run, serving, until

INSTANCE = {"data_source": "sums", "index": 3}


def test_start_process_status_stop(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory) as service:
            ask = service.client.post
            assert (await ask("/process", json={"instance": INSTANCE})).status_code == 503
            await ask("/start")
            answer = await ask("/process", json={"instance": INSTANCE, "job_id": "mine"})
            result = answer.json()
            assert (result["job_id"], result["reward"], result["success"]) == ("mine", 1.0, True)
            (message,) = result["messages"]
            assert len(message["output_ids"]) == len(message["logprobs"]) == 2
            assert message["input_ids"]
            status = (await service.client.get("/status")).json()
            assert status["running"] is True
            await ask("/stop")
            assert (await service.client.get("/status")).json()["running"] is False

    run(check())


def test_bad_requests_are_400(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory) as service:
            await service.client.post("/start")
            for instance, sampling in (
                ({"data_source": "nope", "index": 0}, {}),
                ({"index": 0}, {}),
                ({"data_source": "sums"}, {}),
                (INSTANCE, {"top_p": 0.9}),
                (INSTANCE, {"temperature": "hot"}),
            ):
                body = {"instance": instance, "sampling_params": sampling}
                answer = await service.client.post("/process", json=body)
                assert answer.status_code == 400, answer.text
                assert answer.json()["error"]

    run(check())


def test_cancel_ends_a_blocked_process(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory) as service:
            await service.client.post("/start")
            service.engine.gate.clear()
            body = {"instance": INSTANCE, "job_id": "mine"}
            blocked = asyncio.create_task(service.client.post("/process", json=body))
            await until(lambda: service.engine.in_flight == 1)
            answer = await service.client.post("/cancel", json={"job_id": "mine"})
            assert answer.status_code == 200
            assert (await blocked).status_code == 503
            assert service.engine.in_flight == 0
            again = await service.client.post("/cancel", json={"job_id": "mine"})
            assert again.status_code == 400

    run(check())


def test_malformed_requests_have_v1s_status_and_error(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory, token="t", max_body_bytes=200) as service:
            headers = {"Authorization": "Bearer t"}
            for path, content, status in (
                ("/process", b"{", 400),
                ("/process", b"\xff", 400),
                ("/process", b'{"instance": 3}', 400),
                ("/cancel", b"{}", 400),
                ("/process", b"x" * 300, 413),
            ):
                answer = await service.client.post(path, content=content, headers=headers)
                assert answer.status_code == status, answer.text
                assert answer.json()["error"]
            assert (await service.client.post("/start")).status_code == 401

    run(check())


def test_a_full_queue_is_503_with_a_time_to_come_back(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory, capacity=1, max_queued=0) as service:
            await service.client.post("/start")
            answer = await service.client.post("/process", json={"instance": INSTANCE})
            assert answer.status_code == 503
            assert int(answer.headers["Retry-After"]) > 0

    run(check())


def test_a_name_is_one_running_job(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory) as service:
            await service.client.post("/start")
            service.engine.gate.clear()
            body = {"instance": INSTANCE, "job_id": "mine"}
            first = asyncio.create_task(service.client.post("/process", json=body))
            await until(lambda: service.engine.in_flight == 1)
            again = await service.client.post("/process", json=body)
            assert (again.status_code, "running already" in again.json()["error"]) == (400, True)
            service.engine.gate.set()
            assert (await first).status_code == 200
            assert (await service.client.post("/process", json=body)).status_code == 200

    run(check())


class LlmServer(BaseHTTPRequestHandler):
    """A fake of an LLM server as v1 clients bring them: answers `3` and the stop token."""

    answer: list[int]

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(404, {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(200, {"response_ids": self.answer, "logprobs": [-0.25] * len(self.answer)})

    def _send(self, status: int, body: Any) -> None:
        data = msgspec.json.encode(body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_llm_servers_are_added_and_cleared(directory: Path) -> None:
    from prorl_hpc.agents.render import stop_ids
    from tests.prorl_hpc.rollout.helpers import make_tokenizer

    tokenizer = make_tokenizer()
    ids = [*tokenizer.encode("3", add_special_tokens=False), stop_ids(tokenizer)[0]]
    handler = type("Bound", (LlmServer,), {"answer": ids})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"

    async def check() -> None:
        pool = HttpPool(version=0)
        async with serving(directory, engine=pool) as service:
            await service.client.post("/start")
            answer = await service.client.post("/add_llm_server", json={"address": address})
            assert answer.json()["llm_servers"] == [address]
            first = pool._servers[address]
            again = await service.client.post("/add_llm_server", json={"address": f"{address}/"})
            assert again.json()["llm_servers"] == [address]
            assert pool._servers[address] is first  # its connections aren't leaked
            answer = await service.client.post("/process", json={"instance": INSTANCE})
            assert answer.json()["reward"] == 1.0
            assert answer.json()["messages"][0]["logprobs"] == [-0.25, -0.25]
            await service.client.post("/clear_llm_server")
            assert pool.servers == ()
            bad = await service.client.post("/add_llm_server", json={"address": "nohost"})
            assert bad.status_code == 400
            await pool.close()

    try:
        run(check())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
