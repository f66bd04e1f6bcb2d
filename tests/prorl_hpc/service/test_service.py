"""Jobs over HTTP: results, idempotency, priority, deadlines, cancel, restart, limits."""

import asyncio
import json
from pathlib import Path

import pytest

from prorl_hpc.inference.engine import EngineError
from prorl_hpc.service.places import Places
from tests.prorl_hpc.service.conftest import TOKEN, HeldEngine, run, serving, until


def test_a_job_gives_token_level_trajectories_with_rewards(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory) as service:
            posted = await service.post({"task": "sums", "index": 3, "num_samples": 4})
            assert posted.status_code == 201
            result = await service.finished(posted.json()["id"])
            assert result["state"] == "done"
            assert result["instance_id"] == "echo-3"
            assert [s["sample"] for s in result["samples"]] == [0, 1, 2, 3]
            for sample in result["samples"]:
                assert sample["reward"] == 1.0
                assert sum(sample["loss_mask"]) == 2  # "3" and the stop token
                lengths = {len(sample[k]) for k in ("tokens", "loss_mask", "logprobs", "versions")}
                assert len(lengths) == 1
                assert [v for v, m in zip(sample["versions"], sample["loss_mask"], strict=True)
                        if m] == [0, 0]  # fmt: skip

    run(check())


def test_a_posted_instance_is_prompted_and_scored_as_its_task_does(directory: Path) -> None:
    async def check() -> None:
        prompts: list[tuple[int, ...]] = []

        def answer(ids: tuple[int, ...], affinity: str) -> str:
            prompts.append(ids)
            return "0"

        async with serving(directory, engine=HeldEngine(answer)) as service:
            instance = {"instance_id": "mine", "messages": [{"role": "user", "content": "hello?"}]}
            posted = await service.post({"task": "sums", "instance": instance})
            result = await service.finished(posted.json()["id"])
            assert result["instance_id"] == "mine"
            text = service.engine._tokenizer.decode(list(prompts[0]))
            assert "hello?" in text

    run(check())


def test_what_can_not_be_run_has_the_right_status_and_a_readable_error(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory, token=TOKEN, max_body_bytes=1000) as service:
            ask = service.client.post
            headers = {"Authorization": f"Bearer {TOKEN}"}
            bad: list[tuple[dict[str, object], int, str]] = [
                ({"json": {"task": "swe", "index": 0}}, 404, "choose one of sums"),
                ({"json": {"task": "sums", "index": 100}}, 404, "doesn't exist"),
                ({"json": {"task": "sums"}}, 400, "either index or instance"),
                ({"json": {"task": "sums", "index": 0, "num_samples": 0}}, 422, "num_samples"),
                ({"json": {"task": "sums", "index": 0, "typo": 1}}, 422, "typo"),
                ({"json": {"task": "sums", "index": True, "temperature": -1}}, 422, "temperature"),
                ({"content": b"{"}, 422, "body"),
                ({"json": {"task": "x" * 2000}}, 413, "1000 bytes"),
            ]
            for body, status, words in bad:
                answer = await ask("/v1/jobs", headers=headers, **body)  # type: ignore[arg-type]
                assert (answer.status_code, words in answer.text) == (status, True), answer.text
            assert (await ask("/v1/jobs", json={})).status_code == 401
            wrong = {"Authorization": "Bearer wrong"}
            assert (await ask("/v1/jobs", json={}, headers=wrong)).status_code == 401
            assert (await service.client.get("/health")).status_code == 200
            missing = await service.client.get("/v1/jobs/nope/result", headers=headers)
            assert missing.status_code == 404

    run(check())


def test_the_same_key_is_the_same_job_and_another_request_is_a_conflict(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory) as service:
            headers = {"Idempotency-Key": "step-1"}
            first = await service.post({"task": "sums", "index": 3}, headers=headers)
            await service.finished(first.json()["id"])
            again = await service.post({"task": "sums", "index": 3}, headers=headers)
            assert again.status_code == 200
            assert again.json()["id"] == first.json()["id"]
            other = await service.post({"task": "sums", "index": 4}, headers=headers)
            assert other.status_code == 409
            assert "step-1" in other.json()["detail"]

    run(check())


def test_cancelling_frees_the_requests_at_the_engine(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory) as service:
            service.engine.gate.clear()
            posted = await service.post({"task": "sums", "index": 3, "num_samples": 4})
            job_id = posted.json()["id"]
            await until(lambda: service.engine.in_flight == 4)
            answer = await service.client.delete(f"/v1/jobs/{job_id}")
            assert answer.json()["state"] == "cancelled"
            assert service.engine.in_flight == 0
            assert service.jobs.num_samples_running == 0
            assert (await service.finished(job_id))["samples"] == []
            await service.client.delete(f"/v1/jobs/{job_id}")
            assert (await service.client.get(f"/v1/jobs/{job_id}")).status_code == 404

    run(check())


def test_enough_usable_samples_end_a_job_early(directory: Path) -> None:
    async def check() -> None:
        slow = asyncio.Event()

        class Uneven(HeldEngine):
            async def generate(self, *args: object, affinity: str = "", **more: object) -> object:  # type: ignore[override]
                if affinity.endswith(("-2", "-3")):
                    await slow.wait()
                return await super().generate(*args, affinity=affinity, **more)  # type: ignore[arg-type]

        async with serving(directory, engine=Uneven(lambda ids, a: "3")) as service:
            request = {"task": "sums", "index": 3, "num_samples": 4, "min_usable": 2}
            posted = await service.post(request)
            result = await service.finished(posted.json()["id"])
            assert [s["sample"] for s in result["samples"]] == [0, 1]
            assert result["state"] == "done"
            assert service.jobs.num_samples_running == 0

    run(check())


def test_a_deadline_keeps_what_is_in_and_fails_a_job_with_nothing(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory) as service:
            service.engine.gate.clear()
            posted = await service.post({"task": "sums", "index": 3, "deadline_seconds": 0.05})
            result = await service.finished(posted.json()["id"])
            assert result["state"] == "failed"
            assert "deadline" in result["detail"]
            assert service.engine.in_flight == 0

    run(check())


def test_a_higher_priority_is_served_first(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory, capacity=1) as service:
            service.engine.gate.clear()
            ids = []
            for priority in (0, 0, 5):
                request = {"task": "sums", "index": 3, "priority": priority}
                ids.append((await service.post(request)).json()["id"])
            await until(lambda: service.engine.in_flight == 1)
            service.engine.gate.set()
            for job_id in ids:
                await service.finished(job_id)
            # group ids are 1, 2, 3 in the order of posting; the first had begun already
            assert service.engine.order == ["1-0", "3-0", "2-0"]

    run(check())


def test_back_pressure_says_when_to_come_back(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory, capacity=1, max_queued=1) as service:
            service.engine.gate.clear()
            await service.post({"task": "sums", "index": 3})
            await until(lambda: service.jobs.num_running == 1)
            await service.post({"task": "sums", "index": 3})
            full = await service.post({"task": "sums", "index": 3})
            assert full.status_code == 429
            assert int(full.headers["Retry-After"]) > 0

    run(check())


def test_results_and_unfinished_jobs_survive_a_restart(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory) as service:
            done = (await service.post({"task": "sums", "index": 3})).json()["id"]
            await service.jobs.wait(done, seconds=60)
            service.engine.gate.clear()
            left = (await service.post({"task": "sums", "index": 3})).json()["id"]
            await until(lambda: service.engine.in_flight == 1)
        async with serving(directory) as service:
            assert (await service.finished(done))["state"] == "done"
            assert (await service.finished(left))["state"] == "done"

    run(check())


def test_infrastructure_failures_are_retried_and_never_a_reward(directory: Path) -> None:
    async def check() -> None:
        fail = [True, True]

        def answer(ids: tuple[int, ...], affinity: str) -> str:
            if fail:
                fail.pop()
                raise EngineError("the server died")
            return "3"

        async with serving(directory, engine=HeldEngine(answer)) as service:
            posted = await service.post({"task": "sums", "index": 3})
            result = await service.finished(posted.json()["id"])
            assert [s["reward"] for s in result["samples"]] == [1.0]
            assert service.jobs.num_retries == 2
            fail.extend([True] * 100)
            posted = await service.post({"task": "sums", "index": 3})
            result = await service.finished(posted.json()["id"])
            assert result["state"] == "failed"
            assert [s["reward"] for s in result["samples"]] == [None]
            assert "the server died" in result["detail"]

    run(check())


def test_five_hundred_jobs_at_once(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory, capacity=32) as service:
            posted = await asyncio.gather(
                *(service.post({"task": "sums", "index": i % 9}) for i in range(500))
            )
            assert {p.status_code for p in posted} == {201}
            results = await asyncio.gather(*(service.finished(p.json()["id"]) for p in posted))
            assert [r["instance_id"] for r in results] == [f"echo-{i % 9}" for i in range(500)]
            assert service.jobs.num_samples_running == 0

    run(check())


def test_metrics_and_the_openapi_document(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory) as service:
            await service.finished((await service.post({"task": "sums", "index": 3})).json()["id"])
            text = (await service.client.get("/metrics")).text
            assert 'prorl_samples_total{outcome="scored"} 1\n' in text
            assert 'prorl_jobs_ended_total{state="done"} 1\n' in text
            assert "prorl_sampled_tokens_total 2\n" in text
            document = (await service.client.get("/openapi.json")).json()
            assert {"/v1/jobs", "/v1/jobs/{job_id}/result", "/process"} <= set(document["paths"])
            json.dumps(document)
            tasks = (await service.client.get("/v1/tasks")).json()
            assert tasks == [{"name": "sums", "train_size": 100, "validation_size": 100}]

    run(check())


def test_a_policy_that_is_not_there_is_refused(directory: Path) -> None:
    async def check() -> None:
        async with serving(directory) as service:
            answer = await service.client.post(
                "/v1/policy", json={"version": 2, "path": "not/absolute"}
            )
            assert answer.status_code == 400
            answer = await service.client.post(
                "/v1/policy", json={"version": 2, "path": str(directory)}
            )
            assert answer.json() == {"version": 2}

    run(check())


def test_places_go_to_the_smallest_key_and_survive_cancelling() -> None:
    async def check() -> None:
        places = Places(1)
        await places.acquire(0, 0)
        got: list[int] = []

        async def take(priority: int) -> None:
            await places.acquire(priority, 0)
            got.append(priority)

        tasks = [asyncio.create_task(take(p)) for p in (3, 1, 2)]
        await asyncio.sleep(0)
        places.release()
        tasks[1].cancel()  # it has been given the place already: it is handed on
        await until(lambda: got == [2])
        places.release()
        await until(lambda: got == [2, 3])
        places.release()
        assert places.num_taken == 0

    run(check())


@pytest.mark.parametrize("path", ["/v1/jobs", "/process", "/cancel", "/v1/policy"])
@pytest.mark.parametrize("body", [b"", b"null", b"[]", b'"x"', b"\xff", b'{"task": {}}', b"1e999"])
def test_malformed_bodies_never_break_the_server(directory: Path, path: str, body: bytes) -> None:
    async def check() -> None:
        async with serving(directory) as service:
            for kind in ("application/json", "text/plain"):
                answer = await service.client.post(
                    path, content=body, headers={"Content-Type": kind}
                )
                assert 400 <= answer.status_code < 500

    run(check())
