"""The SGLang engine against a fake that speaks SGLang's documented interface, in processes.

The real one needs a GPU and isn't run here.
"""

import asyncio
import itertools
import socket
import stat
import sys
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from prorl_hpc.choices import EngineKind
from prorl_hpc.inference import supervise
from prorl_hpc.inference.engine import Chunk, EngineError, Sampling
from prorl_hpc.inference.http import Channel, RequestRefused, ServerGone
from prorl_hpc.inference.pool import make_engine
from prorl_hpc.inference.sglang_engine import (
    SglangEngine,
    SglangOptions,
    sglang_command,
    sglang_environment,
)
from prorl_hpc.inference.sglang_server import SglangServer
from prorl_hpc.policy import publish_directory
from prorl_hpc.recipe import RecipeError
from tests.fakes import sglang_server
from tests.fakes.sglang_server import token_of
from tests.prorl_hpc.rollout.helpers import make_recipe

BOUND_SECONDS = 400.0


def run(test: object) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_SECONDS):
            await test  # type: ignore[misc]

    asyncio.run(bounded())


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that runs the fake, whatever module it is asked for."""
    path = tmp_path / "fake python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{sglang_server.__file__}" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def version_at(root: Path, version: int) -> Path:
    def write(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        (directory / "config.json").write_text("{}")

    path = root / f"v{version:08d}"
    publish_directory(path, version=version, step=version, write=write)
    return path


def options(python: str, root: Path) -> SglangOptions:
    return SglangOptions(
        num_servers=1,
        python=python,
        context_tokens=512,
        dtype="bfloat16",
        max_batch=8,
        start_seconds=300.0,
        log_directory=root / "logs",
    )


def engine_of(python: str, root: Path) -> SglangEngine:
    engine = SglangEngine(options(python, root), path=version_at(root, 0), version=0)
    engine.fleet._first_backoff_seconds = 0.01
    return engine


def sampling(n: int, *, stops: tuple[int, ...] = ()) -> Sampling:
    return Sampling(temperature=1.0, max_new_tokens=n, seed=3, stop_token_ids=stops)


async def counts(engine: SglangEngine) -> dict[str, int]:
    channel = Channel(engine.pool.servers[0])
    try:
        data = await channel.get("/fake", timeout_seconds=60)
    finally:
        await channel.close()
    return msgspec.json.decode(data, type=dict[str, int])


def tokens(versions: tuple[int, ...] | list[int], *, prompt: int) -> list[int]:
    return [token_of(place=prompt + i, version=v) for i, v in enumerate(versions)]


@pytest.mark.process
def test_an_update_in_flight_keeps_requests_and_stamps_each_token(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SGLANG_TOKEN_SECONDS", "0.02")

    async def check() -> None:
        engine = engine_of(python, tmp_path)
        await engine.start()
        try:
            stop = token_of(place=4, version=0)
            answer = await engine.generate((1, 2), sampling=sampling(9, stops=(stop,)))
            assert list(answer.token_ids) == tokens([0, 0, 0], prompt=2)
            assert (answer.finish_reason, answer.logprobs) == ("stop", (-0.5,) * 3)
            before = (await counts(engine))["num_tokens"]
            requests = [
                asyncio.create_task(engine.generate((1,) * n, sampling=sampling(60)))
                for n in (1, 5)
            ]
            while (await counts(engine))["num_tokens"] < before + 10:
                await asyncio.sleep(0.01)
            await engine.load(7, path=version_at(tmp_path, 7))
            for n, answer in zip((1, 5), await asyncio.gather(*requests), strict=True):
                assert set(answer.versions) == {0, 7}
                assert list(answer.versions) == sorted(answer.versions)
                assert list(answer.token_ids) == tokens(answer.versions, prompt=n)
                assert len(answer.token_ids) == 60
            seen = await counts(engine)
            # Nobody met keys of old weights: the cache was emptied before the first new token.
            assert (seen["flushed"], seen["stale"]) == (1, 0)
            with pytest.raises(RequestRefused, match="out of vocabulary"):
                await engine.generate((100_000,), sampling=sampling(1))
        finally:
            await engine.close()

    run(check())


@pytest.mark.process
@pytest.mark.parametrize("trouble", ["", "incremental"])
def test_a_stream_goes_on_over_an_update(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setenv("FAKE_SGLANG_TROUBLE", trouble)
    monkeypatch.setenv("FAKE_SGLANG_TOKEN_SECONDS", "0.02")

    async def check() -> None:
        engine = engine_of(python, tmp_path)
        await engine.start()
        try:
            got: list[Chunk] = []
            made: list[tuple[int, int]] = []
            async for chunk in engine.stream((1, 2), sampling=sampling(40)):
                got.append(chunk)
                made += zip(chunk.token_ids, chunk.versions, strict=True)
                if len(got) == 5:
                    await engine.load(7, path=version_at(tmp_path, 7))
            assert {version for _, version in made} == {0, 7}
            assert [t for t, _ in made] == tokens([v for _, v in made], prompt=2)
            reasons = [chunk.finish_reason for chunk in got]
            assert reasons == [None] * (len(got) - 1) + ["length"]
        finally:
            await engine.close()

    run(check())


@pytest.mark.process
@pytest.mark.parametrize("streamed", [True, False])
def test_cancelling_frees_the_request_on_the_server(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    monkeypatch.setenv("FAKE_SGLANG_TOKEN_SECONDS", "0.02")

    async def check() -> None:
        engine = engine_of(python, tmp_path)
        await engine.start()
        try:
            if streamed:
                async with aclosing(engine.stream((1,), sampling=sampling(100_000))) as stream:
                    async for _ in stream:
                        break
            else:
                request = asyncio.create_task(engine.generate((1,), sampling=sampling(100_000)))
                while not (await counts(engine))["running"]:
                    await asyncio.sleep(0.01)
                request.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await request
            while (seen := await counts(engine))["running"]:
                await asyncio.sleep(0.01)
            assert seen["aborted"] == 1
            assert engine.pool.num_lost == 0
        finally:
            await engine.close()

    run(check())


@pytest.mark.process
@pytest.mark.parametrize("trouble", ["load_fails", "flush_fails"])
def test_a_server_that_can_not_follow_is_replaced_at_the_new_version(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setenv("FAKE_SGLANG_TROUBLE", trouble)

    async def check() -> None:
        engine = engine_of(python, tmp_path)
        await engine.start()
        try:
            with pytest.raises(EngineError, match="no server could load version 2"):
                await engine.load(2, path=version_at(tmp_path, 2))
            answer = await engine.generate((1,), sampling=sampling(2))
            assert answer.versions == (2, 2)
        finally:
            await engine.close()

    run(check())


@pytest.mark.process
def test_a_port_that_was_taken_meanwhile_is_no_reason_to_give_up(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = supervise.free_port

    async def check() -> None:
        with socket.socket() as somebody:
            somebody.bind(("127.0.0.1", 0))
            somebody.listen()
            ports = iter([somebody.getsockname()[1]])
            monkeypatch.setattr(supervise, "free_port", lambda: next(ports, None) or free())
            engine = engine_of(python, tmp_path)
            await engine.start()
            try:
                assert len((await engine.generate((1,), sampling=sampling(2))).token_ids) == 2
                assert engine.fleet.num_restarts == 1
            finally:
                await engine.close()

    run(check())


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"completion_tokens": 3, "output_token_logprobs": [[-1.0, 5, None]]}, "tells of 3 tokens"),
        ({"output_token_logprobs": [[None, 5, None]]}, "without a log-probability"),
        ({"output_token_logprobs": [[-1.0, 5, None]], "weight_version": "default"}, "not ours"),
        ({"output_token_logprobs": "none"}, "answered something else"),
    ],
)
def test_answers_that_training_can_not_use_are_the_servers_failure(
    meta: dict[str, object], words: str
) -> None:
    server = SglangServer("http://127.0.0.1:9", version=0)
    data = msgspec.json.encode({"meta_info": {"weight_version": "0"} | meta})
    with pytest.raises(ServerGone, match=words):
        server._read(data, num_known=0)


def test_a_request_that_took_too_long_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is closed, which the server notices late."""
    asked: list[tuple[str, object]] = []

    async def post(path: str, body: dict[str, object], *, timeout_seconds: float) -> bytes:
        asked.append((path, body["rid"]))
        if path == "/generate":
            raise ServerGone("no answer within 1 s")
        return b""

    async def check() -> None:
        server = SglangServer("http://127.0.0.1:9", version=0)
        monkeypatch.setattr(server._channel, "post", post)
        with pytest.raises(ServerGone, match="no answer"):
            await server.generate((1,), sampling=sampling(2))
        await server.close()

    run(check())
    assert [path for path, _ in asked] == ["/generate", "/abort_request"]
    assert asked[0][1] == asked[1][1]


def test_the_command_line_keeps_what_log_probabilities_mean(tmp_path: Path) -> None:
    command = sglang_command(
        options("python", tmp_path), path=Path("/run/policy/v0"), address="http://127.0.0.1:81",
        identity="policy-x",
    )  # fmt: skip
    pairs = dict(itertools.pairwise(command))
    assert pairs["--port"] == "81"
    assert pairs["--served-model-name"] == "policy-x"
    assert pairs["--sampling-defaults"] == "openai"
    made = sglang_environment(
        options("python", tmp_path),
        slot=0,
        base={"SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "RANK": "3", "HOME": "/h"},
    )
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" not in made
    assert "RANK" not in made


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        (EngineKind.sglang, "--sampling-defaults=model"),
        (EngineKind.vllm, "--logprobs_mode"),
        (EngineKind.vllm, "--port"),
    ],
)
def test_arguments_that_would_change_ours_are_refused(
    tmp_path: Path, kind: EngineKind, argument: str
) -> None:
    recipe = make_recipe()
    recipe.rollout.engine.kind = kind
    recipe.rollout.engine.arguments = ["--seed", "1", argument]
    with pytest.raises(RecipeError, match=r"rollout\.engine\.arguments holds '--"):
        make_engine(recipe, path=tmp_path, version=0)
