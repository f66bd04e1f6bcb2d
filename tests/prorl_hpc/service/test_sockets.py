"""The service behind a real socket: many clients, clients that hang up, sockets that are taken."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.service.job import Where
from prorl_hpc.service.serve import ServeError, listening
from tests.prorl_hpc.service.conftest import HeldEngine, run, serving, until

JOB = {"task": "sums", "index": 3}


def test_small_answers_leave_at_once(directory: Path) -> None:
    # Without TCP_NODELAY a small answer may wait 40 ms for a delayed acknowledgement.
    accepted: list[Any] = []

    async def check() -> None:
        async with serving(directory, over_tcp=True) as service:
            loop: Any = asyncio.get_running_loop()
            assert (await service.client.get("/health")).status_code == 200
            for transport in list(loop._transports.values()):
                found = transport.get_extra_info("socket")
                if found is not None and found.family == socket.AF_INET:
                    accepted.append(found)
            ours = [s for s in accepted if f":{s.getsockname()[1]}" in service.url]
            assert ours
            for found in ours:
                assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(check())


async def ask(url: str, method: str, path: str, body: Any = None, **headers: str) -> Any:
    """One request on a connection of its own: (status, decoded body)."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        data = b"" if body is None else json.dumps(body).encode()
        fields = {"Host": "x", "Connection": "close", "Content-Type": "application/json",
                  "Content-Length": str(len(data))} | headers  # fmt: skip
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        answer = await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()
    top, _, content = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(content)


def test_five_hundred_clients_at_once(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory, over_tcp=True, capacity=32) as service:

            async def one(number: int) -> str:
                body = {"task": "sums", "index": number % 9}
                key = {"Idempotency-Key": f"key-{number}"}
                status, job = await ask(service.url, "POST", "/v1/jobs", body, **key)
                assert status in (200, 201), job
                path = f"/v1/jobs/{job['id']}/result?wait_seconds=120"
                status, result = await ask(service.url, "GET", path)
                assert status == 200, result
                return str(result["instance_id"])

            results = await asyncio.gather(*(one(number) for number in range(500)))
            assert results == [f"echo-{number % 9}" for number in range(500)]
            assert service.jobs.num_samples_running == 0
            assert service.jobs.ended["done"] == 500

    run(check())


def test_one_key_from_many_clients_is_one_job(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory, over_tcp=True) as service:
            headers = {"Idempotency-Key": "the same"}
            answers = await asyncio.gather(*(service.post(JOB, headers=headers) for _ in range(20)))
            assert len({answer.json()["id"] for answer in answers}) == 1
            await service.finished(answers[0].json()["id"])
            assert service.jobs.ended["done"] == 1

    run(check())


async def hang_up_after(url: str, method: str, path: str, body: Any, ready: Any) -> None:
    """Sends a request, waits for `ready`, and closes the connection without reading."""
    host, _, port = url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    await until(ready)
    writer.transport.abort()


def test_a_v1_client_that_hangs_up_frees_its_rollout(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory, over_tcp=True) as service:
            await service.client.post("/start")
            service.engine.gate.clear()
            body = {"instance": {"data_source": "sums", "index": 3}}
            await hang_up_after(
                service.url, "POST", "/process", body, lambda: service.engine.in_flight == 1
            )
            await until(lambda: service.engine.in_flight == 0)
            assert (await service.client.get("/status")).json()["active"] == 0

    run(check())


def test_a_client_that_hangs_up_and_comes_back_finds_its_result(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory, over_tcp=True) as service:
            service.engine.gate.clear()
            job_id = (await service.post(JOB)).json()["id"]
            path = f"/v1/jobs/{job_id}/result?wait_seconds=300"
            await hang_up_after(
                service.url, "GET", path, None, lambda: service.engine.in_flight == 1
            )
            service.engine.gate.set()
            for _ in range(2):  # and again: a result that was fetched stays for a while
                assert (await service.finished(job_id))["state"] == "done"

    run(check())


def test_a_body_without_a_length_is_bounded(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory, over_tcp=True, max_body_bytes=1000) as service:

            async def endless() -> Any:
                for _ in range(100):
                    yield b"x" * 100

            answer = await service.client.post("/v1/jobs", content=endless())
            assert answer.status_code == 413
            assert (await service.client.get("/health")).status_code == 200

    run(check())


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = Where(directory=tmp_path, policy=tmp_path, port=taken.getsockname()[1])
        with pytest.raises(ServeError, match="choose another one"), listening(where):
            pass


def test_a_socket_of_a_living_service_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    where = Where(directory=tmp_path, policy=tmp_path, socket_path=path)
    with listening(where) as (listener, _):
        listener.listen()
        with pytest.raises(ServeError, match="can't listen"), listening(where):
            pass
        assert path.exists()
    path.touch()
    with pytest.raises(ServeError), listening(where):  # a file of the user's isn't removed
        pass
    assert path.exists()


def test_an_engine_that_never_answers_ends_the_job_at_its_deadline(directory: Path) -> None:
    async def check() -> None:
        engine = HeldEngine(lambda ids, affinity: "3")
        engine.gate.clear()
        async with serving(directory, engine=engine, over_tcp=True) as service:
            posted = await service.post(JOB | {"deadline_seconds": 0.1})
            assert (await service.finished(posted.json()["id"]))["state"] == "failed"
            assert engine.in_flight == 0

    run(check())
