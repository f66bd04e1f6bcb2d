"""Whole attempts of Gym tasks through the pipeline, against a server that keeps sessions."""

import asyncio
import json
import re
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import JSONResponse, PlainTextResponse

from prorl_hpc.choices import AgentKind
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Outcome
from prorl_hpc.run import Run
from prorl_hpc.service.job import Where
from prorl_hpc.service.serve import listening, make_server
from prorl_hpc.tasks.base import VerifierError
from prorl_hpc.tasks.nemo_gym.server import ServerSession
from prorl_hpc.tasks.nemo_gym.task import NemoGymTask, make_nemo_gym
from tests.fakes.gym_server import GymServer, by_text
from tests.prorl_hpc.agents.templates import byte_tokenizer
from tests.prorl_hpc.rollout.helpers import make_lease, make_pipeline, make_recipe
from tests.prorl_hpc.service.conftest import run, running, serving

INCREMENT = {
    "type": "function",
    "name": "increment_counter",
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}},
}
READ = {"type": "function", "name": "get_counter_value"}


def rows(**more: Any) -> list[dict[str, Any]]:
    return [
        {"responses_create_params": {"input": f"say {word}"} | more, "expected_answer": word,
         "initial_count": 3, "expected_count": 6}
        for word in ("red", "green")
    ]  # fmt: skip


def call(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{body}</tool_call>"


class Gym:
    """A pipeline with one Gym task, as `sums`."""

    def __init__(self, pipeline: Any, server: GymServer, recipe: Any) -> None:
        self.pipeline = pipeline
        self.server = server
        self.recipe = recipe

    async def attempt(self, index: int = 0) -> Any:
        return await self.pipeline.produce(make_lease(instance_index=index), 0)


@asynccontextmanager
async def gym(
    directory: Path,
    answers: Any,
    *,
    verify: Any = None,
    data: list[dict[str, Any]] | None = None,
    timeout_seconds: float = 60.0,
    url: str | None = None,
    **config: Any,
) -> Any:
    server = GymServer(verify)
    where = Where(directory=directory, policy=directory)
    path = directory / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, data or rows())))
    with listening(where) as (listener, address):
        async with running(make_server(server.app), listener):
            task_config = TaskConfig(
                kind="nemo_gym",
                data=str(path),
                validation_size=1,
                score_timeout_seconds=timeout_seconds,
                options={"resources_server": url or address},
                **config,
            )
            recipe = make_recipe(max_new_tokens=400)
            recipe = replace(
                recipe,
                tasks={"sums": task_config},
                model=replace(recipe.model, context_tokens=8000),
            )
            tokenizer = byte_tokenizer()
            made = make_nemo_gym("sums", task_config, 0)
            task = NemoGymTask(
                made._problems,
                servers=made._servers,
                timeout_seconds=timeout_seconds,
                connect=lambda to: ServerSession(to, first_pause_seconds=0.01),
            )
            pipeline = make_pipeline(
                ScriptedEngine(tokenizer, answers),
                run=Run(directory / "run"),
                recipe=recipe,
                task=task,
                tokenizer=tokenizer,
            )
            yield Gym(pipeline, server, recipe)


def test_one_answer_is_verified_with_its_tokens(tmp_path: Path) -> None:
    async def check() -> None:
        answer = "<think>which?</think>red or green"
        async with gym(tmp_path, [answer], verify=by_text) as it:
            trajectory = await it.attempt()
            assert trajectory.outcome is Outcome.scored, trajectory.detail
            assert trajectory.reward == 1.0
            assert trajectory.components == {"correct": 1.0, "length": 12.0}
            assert set(trajectory.timings) >= {"init", "run", "eval"}
            (seed, row), (verify, body) = it.server.seen
            assert (seed, verify) == ("seed_session", "verify")
            assert row == {k: v for k, v in body.items() if k != "response"}
            reasoning, message = body["response"]["output"]
            assert reasoning["summary"][0]["text"] == "which?"
            assert message["content"][0]["text"] == "red or green"
            sampled = trajectory.loss_mask == 1
            assert message["generation_token_ids"] == trajectory.tokens[sampled].tolist()
            assert message["prompt_token_ids"] == trajectory.tokens[~sampled].tolist()
            assert message["generation_log_probs"] == [0.0] * int(sampled.sum())

    run(check())


def test_tools_are_called_in_the_session_that_is_verified(tmp_path: Path) -> None:
    async def check() -> None:
        answers = [
            call("increment_counter", count=1) + call("increment_counter", count="x"),
            call("increment_counter", count=2) + call("verify") + call("get_counter_value"),
            "done",
        ]
        tools = rows(tools=[INCREMENT, READ])
        async with gym(tmp_path, answers, data=tools, agent=AgentKind.tools, max_turns=5) as it:
            trajectory = await it.attempt()
            assert trajectory.outcome is Outcome.scored, trajectory.detail
            assert trajectory.reward == 1.0  # 3 + 1 + 2, as the rows expect
            paths = [path for path, _ in it.server.seen]
            assert paths == ["seed_session", *["increment_counter"] * 3, "get_counter_value",
                             "verify"]  # fmt: skip
            output = it.server.seen[-1][1]["response"]["output"]
            results = [i["output"] for i in output if i["type"] == "function_call_output"]
            assert "count must be an integer" in results[1]
            assert results[3] == (
                "There is no tool 'verify'; the tools are increment_counter, get_counter_value."
            )
            assert json.loads(results[4]) == {"count": 6}
            carrying = [item for item in output if "generation_token_ids" in item]
            assert len(carrying) == 3
            assert sum(len(i["generation_token_ids"]) for i in carrying) == int(
                trajectory.loss_mask.sum()
            )
            assert (
                carrying[2]["prompt_token_ids"]
                == trajectory.tokens[: len(carrying[2]["prompt_token_ids"])].tolist()
            )

    run(check())


def test_the_limit_of_turns_ends_an_episode_and_it_is_verified(tmp_path: Path) -> None:
    async def check() -> None:
        answers = [call("increment_counter", count=3)] * 9
        tools = rows(tools=[INCREMENT])
        async with gym(tmp_path, answers, data=tools, agent=AgentKind.tools, max_turns=2) as it:
            trajectory = await it.attempt()
            assert (trajectory.outcome, trajectory.reward) == (Outcome.truncated, 0.0)
            assert it.server.seen[-1][0] == "verify"

    run(check())


def test_attempts_do_not_share_sessions(tmp_path: Path) -> None:
    async def check() -> None:
        answers = [call("increment_counter", count=3), "done"]
        tools = rows(tools=[INCREMENT])
        async with gym(tmp_path, answers, data=tools, agent=AgentKind.tools, max_turns=3) as it:
            found = await asyncio.gather(
                *(it.pipeline.produce(make_lease(group_id=n, instance_index=0), 0) for n in
                  range(8))
            )  # fmt: skip
            assert [t.reward for t in found] == [1.0] * 8
            assert list(it.server.counters.values()) == [6] * 8

    run(check())


def masked(body: Any, _: Any) -> Any:
    return {"reward": 0.0, "mask_sample": True, "failure_kind": "judge_unavailable"}


def not_json(body: Any, _: Any) -> Any:
    return PlainTextResponse('{"reward": NaN}')


def refused(body: Any, _: Any) -> Any:
    return JSONResponse({"detail": "expected_answer: field required"}, status_code=422)


@pytest.mark.parametrize(
    ("verify", "words"),
    [
        (masked, "judge_unavailable"),
        (not_json, "answered something else"),
        (refused, "answered 422: .*field required"),
        (lambda body, server: {"reward": True}, "reward=True"),
        (lambda body, server: {"score": 1.0, "reward": None}, "reward=None"),
    ],
)
def test_a_failure_of_the_server_is_never_a_reward(tmp_path: Path, verify: Any, words: str) -> None:
    async def check() -> None:
        async with gym(tmp_path, ["red"], verify=verify) as it:
            trajectory = await it.attempt()
            assert trajectory.outcome is Outcome.infrastructure_failure
            assert trajectory.reward is None
            assert re.search(words, trajectory.detail), trajectory.detail

    run(check())


def test_an_overloaded_server_is_asked_again(tmp_path: Path) -> None:
    async def check() -> None:
        async with gym(tmp_path, ["red or green"] * 2, verify=by_text) as it:
            it.server.statuses = [503, 429, 502]
            assert (await it.attempt()).reward == 1.0
            assert len(it.server.seen) == 3 + 2
            it.server.statuses = [503] * 4
            trajectory = await it.attempt()
            assert trajectory.outcome is Outcome.infrastructure_failure
            assert "init: VerifierError" in trajectory.detail

    run(check())


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 502 x\r\nContent-Length: 0\r\n\r\n"])
def test_a_call_of_a_tool_is_never_made_twice(answer: bytes) -> None:
    """What hangs up, or a proxy that lost its server, may have carried it out."""

    async def check() -> None:
        asked: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append((await reader.readline()).split()[1])
            writer.write(answer)
            writer.close()

        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        session = ServerSession(url, first_pause_seconds=0.01)
        try:
            with pytest.raises(VerifierError):
                await session.call("buy", {}, timeout_seconds=60.0)
            with pytest.raises(VerifierError):
                await session.seed({}, timeout_seconds=60.0)
        finally:
            await session.close()
            listener.close()
        assert asked == [b"/buy"] + [b"/seed_session"] * 4

    run(check())


def test_a_server_that_hangs_or_is_not_there(tmp_path: Path) -> None:
    async def check() -> None:
        hang = asyncio.Event()
        async with gym(tmp_path, ["red"], timeout_seconds=0.2) as it:

            async def stall() -> None:
                await hang.wait()

            it.server.app.router.routes.clear()
            it.server.app.add_api_route("/seed_session", stall, methods=["POST"])
            trajectory = await it.attempt()
            assert "didn't answer within 0.2 s" in trajectory.detail
            hang.set()
        async with gym(tmp_path, ["red"], url="http://127.0.0.1:1") as it:
            trajectory = await it.attempt()
            assert trajectory.outcome is Outcome.infrastructure_failure
            assert "http://127.0.0.1:1/seed_session" in trajectory.detail

    run(check())


def test_the_service_serves_gym_rows_and_speaks_gyms_names(tmp_path: Path) -> None:
    async def check() -> None:
        async with gym(tmp_path, lambda ids, a: "red", verify=by_text) as it:
            parts = it.pipeline._parts
            pipeline = {
                "recipe": it.recipe, "task": parts.tasks["sums"], "tokenizer": parts.tokenizer,
            }  # fmt: skip
            async with serving(
                tmp_path / "service", engine=parts.engine, pipeline=pipeline
            ) as service:
                mine = rows()[0] | {"expected_answer": "re"}
                instance = {"instance_id": "mine", "answer": mine,
                            "messages": [{"role": "user", "content": "say re"}]}  # fmt: skip
                posted = await service.post({"task": "sums", "instance": instance})
                job_id = posted.json()["id"]
                assert (await service.finished(job_id))["samples"][0]["reward"] == 1.0
                path = f"/v1/jobs/{job_id}/result?form=nemo_gym"
                (rollout,) = (await service.client.get(path)).json()["rollouts"]
                (item,) = rollout["response"]["output"]
                assert rollout["reward"] == 1.0
                assert rollout["instance_id"] == "mine"
                assert item["content"][0]["text"] == "red"
                assert len(item["generation_token_ids"]) == len(item["generation_log_probs"]) == 4
                assert item["prompt_token_ids"]
                wrong = await service.post({"task": "sums", "instance": instance | {"answer": 3}})
                assert wrong.status_code == 400
                assert "responses_create_params" in wrong.json()["detail"]

    run(check())
