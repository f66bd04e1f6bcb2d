"""The HTTP face of an inference job: over real sockets, with a scripted engine behind it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from prorl_hpc.inference import gateway
from prorl_hpc.inference.announce import load_token
from prorl_hpc.inference.engine import Sampling
from prorl_hpc.inference.http import RequestRefused, ServerGone
from prorl_hpc.inference.remote import RemoteServer, conversation
from prorl_hpc.policy import publish_policy
from prorl_hpc.run import Run
from tests.prorl_hpc.inference.serving_helpers import EchoEngine, HttpJob, bounded, jobs, until

SAMPLING = Sampling(temperature=0.7, max_new_tokens=3, stop_token_ids=(1, 2), seed=5)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "r")
    run.root.mkdir()
    return run


def publish(run: Run, version: int, *, content: bytes = b"{}") -> None:
    publish_policy(
        run,
        version=version,
        step=version,
        write=lambda directory: (directory / "config.json").write_bytes(content) and None,
    )


def client(job: HttpJob, *, token: str | None = None, newest: int = -1) -> RemoteServer:
    return RemoteServer(
        job.announcement(),
        token=token or load_token(job.run),
        request_seconds=120.0,
        newest=lambda: newest,
        heard=lambda *_: None,
        drains=lambda _: None,
    )


def test_tokens_in_tokens_out_with_everything_that_was_asked_for(run: Run) -> None:
    async def check() -> None:
        job = HttpJob(run)
        async with jobs(job):
            server = client(job)
            await server.check()
            conversation.set("group-3")
            completion = await server.generate((4, 5, 6), sampling=SAMPLING)
            assert completion.token_ids == (7, 7, 7)
            assert completion.logprobs == (-0.1,) * 3
            assert completion.versions == (0, 0, 0)
            assert completion.finish_reason == "length"
            assert job.engine.last == ((4, 5, 6), SAMPLING, "group-3")
            assert (job.gateway.num_completed, job.gateway.in_flight) == (1, 0)
            await server.close()

    bounded(check())


def test_strangers_and_senseless_requests_are_refused(run: Run) -> None:
    async def check() -> None:
        job = HttpJob(run)
        async with jobs(job):
            stranger = client(job, token="wrong")
            with pytest.raises(ServerGone, match="somebody else's"):
                await stranger.check()
            with pytest.raises(RequestRefused, match="401"):
                await stranger.generate((1,), sampling=SAMPLING)
            await stranger.close()
            auth = {"authorization": f"Bearer {load_token(run)}"}
            base = f"http://127.0.0.1:{job.port}"
            async with httpx.AsyncClient(base_url=base, headers=auth, timeout=120) as http:

                async def status(body: Any, path: str = "/v1/generate") -> int:
                    return (await http.post(path, content=body)).status_code

                assert await status(b"no json") == 400
                assert await status(json.dumps({"prompt_ids": ["x"]})) == 400
                assert await status(b"x" * 200_000) == 413
                assert await status(b"{}", "/v1/other") == 404
            assert job.engine.num_requests == 0

    bounded(check())


def test_another_process_at_the_same_port_is_not_taken_for_ours(run: Run) -> None:
    async def check() -> None:
        job = HttpJob(run)
        async with jobs(job):
            server = client(job)
            job.gateway.identity = "a successor"
            with pytest.raises(ServerGone, match="somebody else's"):
                await server.check()
            await server.close()

    bounded(check())


def test_a_client_that_goes_away_cancels_its_request(run: Run) -> None:
    async def check() -> None:
        job = HttpJob(run)
        async with jobs(job):
            job.engine.hold.clear()
            server = client(job)
            request = asyncio.create_task(server.generate((1,), sampling=SAMPLING))
            await until(lambda: job.engine.running == 1)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            await until(lambda: job.engine.cancelled == 1)
            await until(lambda: job.gateway.in_flight == 0)
            await server.close()

    bounded(check())


def test_a_draining_job_ends_what_it_has_and_takes_nothing_more(run: Run) -> None:
    async def check() -> None:
        job = HttpJob(run)
        async with jobs(job):
            job.engine.hold.clear()
            server = client(job)
            request = asyncio.create_task(server.generate((1,), sampling=SAMPLING))
            await until(lambda: job.gateway.in_flight == 1)
            job.gateway.draining = True
            with pytest.raises(ServerGone, match=r"503: .*draining"):
                await server.generate((1,), sampling=SAMPLING)
            await server.check()
            assert server.draining
            job.engine.hold.set()
            assert len((await request).token_ids) == 3
            await server.close()

    bounded(check())


def test_an_engine_that_fails_once_is_probed_and_one_that_is_dead_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "PROBE_PAUSES_SECONDS", (0.0, 0.01))

    async def check() -> None:
        job = HttpJob(run)
        async with jobs(job):
            server = client(job)
            job.engine.error = "out of memory"
            with pytest.raises(ServerGone, match=r"500: .*out of memory"):
                await server.generate((1,), sampling=SAMPLING)
            await until(lambda: job.gateway.dead)
            assert "the engine is dead: out of memory" in job.gateway.trouble
            with pytest.raises(ServerGone, match="the engine is dead"):
                await server.check()

            other = HttpJob(run, index=1)
            await other.start()
            second = client(other)
            other.engine.error, other.engine.num_failures = "a hiccup", 1
            with pytest.raises(ServerGone, match="a hiccup"):
                await second.generate((1,), sampling=SAMPLING)
            await until(lambda: not other.gateway.trouble)
            await second.check()
            await other.kill()
            await server.close()
            await second.close()

    bounded(check())


def test_an_engine_that_answers_nothing_for_long_is_dead(run: Run) -> None:
    async def check() -> None:
        job = HttpJob(run)
        now = [0.0]
        job.gateway._clock = lambda: now[0]
        job.gateway._moved = 0.0
        async with jobs(job):
            job.engine.hold.clear()
            server = client(job)
            now[0] = 5000.0  # idle for long, which is nobody's fault
            request = asyncio.create_task(server.generate((1,), sampling=SAMPLING))
            await until(lambda: job.engine.running == 1)
            assert job.gateway.trouble == ""
            now[0] = 5601.0  # 601 s without an answer; the bound is 600 s
            assert "answered nothing for 600 s" in job.gateway.trouble
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            await server.close()

    bounded(check())


def test_clients_that_lose_patience_do_not_hide_that_the_engine_hangs(run: Run) -> None:
    async def check() -> None:
        job = HttpJob(run)
        now = [0.0]
        job.gateway._clock = lambda: now[0]
        async with jobs(job):
            job.engine.hold.clear()
            server = client(job)
            asked = [asyncio.create_task(server.generate((1,), sampling=SAMPLING)) for _ in "ab"]
            await until(lambda: job.engine.running == 2)
            now[0] = 599.0
            asked[0].cancel()
            await until(lambda: job.gateway.in_flight == 1)
            now[0] = 601.0  # the other one has waited for 601 s; the bound is 600 s
            assert "answered nothing for 600 s" in job.gateway.trouble
            asked[1].cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await server.close()

    bounded(check())


def test_a_version_that_can_not_be_loaded_says_nothing_against_the_engine(run: Run) -> None:
    async def check() -> None:
        for version in (0, 1):
            publish(run, version)
        job = HttpJob(run)
        job.engine.load_error = "a file is damaged"
        async with jobs(job):
            server = client(job)
            bound = Sampling(temperature=1.0, max_new_tokens=1, policy_version=1)
            with pytest.raises(ServerGone, match=r"500: .*a file is damaged"):
                await server.generate((1,), sampling=bound)
            await server.check()  # what else it works on goes on
            assert job.engine.num_requests == 0
            await server.close()

    bounded(check())


def test_bound_requests_get_exactly_their_version_and_others_the_newest(run: Run) -> None:
    async def check() -> None:
        for version in (0, 1, 2):
            publish(run, version)
        job = HttpJob(run, engine=EchoEngine(version=0))
        async with jobs(job):
            server = client(job, newest=2)
            bound = Sampling(temperature=1.0, max_new_tokens=2, policy_version=1)
            assert (await server.generate((1,), sampling=bound)).versions == (1, 1)
            # Nobody is bound any more: the version that the request told of is loaded.
            await until(lambda: job.engine.version == 2)
            assert (await server.generate((1,), sampling=SAMPLING)).versions == (2, 2, 2)
            # Back to an older one, as long as it is published.
            assert (await server.generate((1,), sampling=bound)).versions == (1, 1)
            await until(lambda: job.engine.version == 2)
            gone = Sampling(temperature=1.0, max_new_tokens=2, policy_version=1)
            for path in run.policy(1).iterdir():
                path.unlink()
            run.policy(1).rmdir()
            with pytest.raises(RequestRefused, match=r"409: .*version 1 was removed"):
                await server.generate((1,), sampling=gone)
            await server.close()

    bounded(check())


def test_a_bound_request_keeps_the_engine_where_it_is_until_it_has_ended(run: Run) -> None:
    async def check() -> None:
        for version in (0, 1):
            publish(run, version)
        job = HttpJob(run)
        async with jobs(job):
            server = client(job)
            job.engine.hold.clear()
            bound = Sampling(temperature=1.0, max_new_tokens=1, policy_version=0)
            first = asyncio.create_task(server.generate((1,), sampling=bound))
            await until(lambda: job.engine.running == 1)
            job.versions.offer(1)
            later = Sampling(temperature=1.0, max_new_tokens=1, policy_version=1)
            second = asyncio.create_task(server.generate((1,), sampling=later))
            await until(lambda: job.gateway.in_flight == 2)
            assert job.engine.loads == []
            job.engine.hold.set()
            assert (await first).versions == (0,)
            assert (await second).versions == (1,)
            await server.close()

    bounded(check())
