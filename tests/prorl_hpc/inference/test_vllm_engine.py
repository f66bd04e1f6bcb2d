"""The vLLM engine against a fake that speaks vLLM's HTTP interface, in processes of its own."""

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from hpc.groups import members
from prorl_hpc.inference.engine import Chunk, EngineError, Sampling
from prorl_hpc.inference.http import Channel, RequestRefused
from prorl_hpc.inference.supervise import Launch, ServerProcess
from prorl_hpc.inference.vllm_engine import (
    VllmEngine,
    VllmOptions,
    vllm_command,
    vllm_environment,
)
from prorl_hpc.policy import publish_directory
from tests.fakes import vllm_server
from tests.fakes.vllm_server import token_of

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
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{vllm_server.__file__}" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def version_at(root: Path, version: int) -> Path:
    def write(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        config = {"hidden_size": 64, "num_attention_heads": 2}
        (directory / "config.json").write_bytes(msgspec.json.encode(config))

    path = root / f"v{version:08d}"
    publish_directory(path, version=version, step=version, write=write)
    return path


def engine_of(python: str, root: Path, *, num_servers: int = 1, **more: object) -> VllmEngine:
    options = VllmOptions(
        num_servers=num_servers,
        python=python,
        context_tokens=512,
        dtype="float32",
        max_batch=8,
        start_seconds=60.0,
        log_directory=root / "logs",
    )
    options = replace(options, **more)  # type: ignore[arg-type]
    return VllmEngine(options, path=version_at(root, 0), version=0)


def sampling(n: int, *, seed: int = 3, stops: tuple[int, ...] = ()) -> Sampling:
    return Sampling(temperature=1.0, max_new_tokens=n, seed=seed, stop_token_ids=stops)


async def fake_state(engine: VllmEngine) -> dict[str, int]:
    channel = Channel(engine.pool.servers[0])
    try:
        data = await channel.get("/fake", timeout_seconds=30)
    finally:
        await channel.close()
    return msgspec.json.decode(data, type=dict[str, int])


@pytest.mark.process
def test_tokens_in_tokens_out_and_a_version_per_token(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_TOKEN_SECONDS", "0.02")

    async def check() -> None:
        engine = engine_of(python, tmp_path)
        await engine.start()
        try:
            stop = token_of(seed=3, place=2, version="0")
            answer = await engine.generate((1, 2), sampling=sampling(9, stops=(stop,)))
            assert answer.token_ids == tuple(
                token_of(seed=3, place=i, version="0") for i in range(3)
            )
            assert answer.finish_reason == "stop"
            assert answer.logprobs == (-0.5,) * 3
            before = (await fake_state(engine))["num_tokens"]
            request = asyncio.create_task(engine.generate((1,), sampling=sampling(100)))
            while (await fake_state(engine))["num_tokens"] < before + 5:
                await asyncio.sleep(0.01)
            await engine.load(7, path=version_at(tmp_path, 7))
            answer = await request
            assert set(answer.versions) == {0, 7}
            assert list(answer.versions) == sorted(answer.versions)
            assert answer.token_ids == tuple(
                token_of(seed=3, place=i, version=str(v)) for i, v in enumerate(answer.versions)
            )
            assert engine.version == 7
            with pytest.raises(RequestRefused, match="out of vocabulary"):
                await engine.generate((100_000,), sampling=sampling(1))
        finally:
            await engine.close()

    run(check())


async def collected(stream: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in stream]


@pytest.mark.process
def test_a_stream_is_the_answer_in_chunks_with_a_version_on_each_token(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_TOKEN_SECONDS", "0.02")

    async def check() -> None:
        engine = engine_of(python, tmp_path)
        await engine.start()
        try:
            whole = await engine.generate((1, 2), sampling=sampling(9))
            chunks = await collected(engine.stream((1, 2), sampling=sampling(9)))
            assert len(chunks) > 1
            assert sum((c.token_ids for c in chunks), ()) == whole.token_ids
            assert sum((c.logprobs for c in chunks), ()) == whole.logprobs
            assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
            # An update falls into a stream: the server's own account, at the end, agrees.
            made: list[tuple[int, int]] = []
            async with aclosing(engine.stream((1,), sampling=sampling(60))) as stream:
                async for chunk in stream:
                    made += zip(chunk.token_ids, chunk.versions, strict=True)
                    if len(made) == 10:
                        await engine.load(7, path=version_at(tmp_path, 7))
            assert {version for _, version in made} == {0, 7}
            assert [token for token, _ in made] == [
                token_of(seed=3, place=i, version=str(v)) for i, (_, v) in enumerate(made)
            ]
        finally:
            await engine.close()

    run(check())


@pytest.mark.process
def test_a_stream_with_a_wrong_stamp_fails_instead_of_lying(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_TROUBLE", "other_spans")

    async def check() -> None:
        engine = engine_of(python, tmp_path)
        await engine.start()
        try:
            with pytest.raises(EngineError, match=r"versions \[0\] that \[99\] made"):
                await collected(engine.stream((1,), sampling=sampling(3)))
            assert (engine.pool.num_retries, engine.pool.num_lost) == (0, 0)
        finally:
            await engine.close()

    run(check())


@pytest.mark.process
@pytest.mark.parametrize("streamed", [True, False])
def test_cancelling_frees_the_request_on_the_server(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    monkeypatch.setenv("FAKE_VLLM_TOKEN_SECONDS", "0.02")

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
                while (await fake_state(engine))["running"] == 0:
                    await asyncio.sleep(0.01)
                request.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await request
            while (state := await fake_state(engine))["running"] or not state["aborted"]:
                await asyncio.sleep(0.01)
            assert engine.pool._balancer.in_flight(engine.pool.servers[0]) == 0
            assert engine.pool.num_lost == 0
        finally:
            await engine.close()

    run(check())


@pytest.mark.process
def test_a_server_killed_under_load_loses_no_request_and_is_replaced(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_TOKEN_SECONDS", "0.02")

    async def check() -> None:
        engine = engine_of(python, tmp_path, num_servers=2)
        engine.fleet._first_backoff_seconds = 0.01
        processes: list[ServerProcess] = []
        start = ServerProcess.start

        async def noted(self: ServerProcess) -> None:
            await start(self)
            processes.append(self)

        monkeypatch.setattr(ServerProcess, "start", noted)
        await engine.start()
        try:
            requests = [
                asyncio.create_task(engine.generate((1,), sampling=sampling(40, seed=i)))
                for i in range(8)
            ]
            while (await fake_state(engine))["running"] == 0:
                await asyncio.sleep(0.01)
            guard = processes[0]._process
            assert guard is not None
            (server,) = children(guard.pid)
            os.kill(server, signal.SIGKILL)
            answers = await asyncio.gather(*requests)
            assert [len(answer.token_ids) for answer in answers] == [40] * 8
            assert engine.pool.num_retries >= 1
            await engine.load(4, path=version_at(tmp_path, 4))
            while len(engine.pool.servers) < 2:
                await asyncio.sleep(0.02)
            answers = await asyncio.gather(
                *(engine.generate((1,), sampling=sampling(2)) for _ in range(6))
            )
            assert {v for answer in answers for v in answer.versions} == {4}
        finally:
            await engine.close()
        assert all(p.exit_code is not None for p in processes)

    run(check())


def children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.process
@pytest.mark.parametrize(
    ("trouble", "start_seconds", "words"),
    [
        ("dies", 300.0, r"ended with 3 before it was well.*no such model architecture"),
        ("never_well", 0.5, r"wasn't well within 0\.5 s.*its last words"),
    ],
)
def test_a_server_that_never_gets_well_is_explained_by_its_own_words(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    trouble: str, start_seconds: float, words: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("FAKE_VLLM_TROUBLE", trouble)

    async def check() -> None:
        engine = engine_of(python, tmp_path, start_seconds=start_seconds)
        with pytest.raises(EngineError, match=f"(?s){words}"):
            await engine.start()
        await engine.close()
        # Closing again must close nothing that isn't its own any more.
        number = os.open(os.devnull, os.O_RDONLY)
        await engine.close()
        os.close(number)

    run(check())


@pytest.mark.process
def test_a_server_that_can_not_load_is_replaced_at_the_new_version(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_TROUBLE", "load_fails")

    async def check() -> None:
        engine = engine_of(python, tmp_path)
        engine.fleet._first_backoff_seconds = 0.01
        await engine.start()
        try:
            with pytest.raises(EngineError, match="no server could load version 2"):
                await engine.load(2, path=version_at(tmp_path, 2))
            # Its successor starts from the new directory, without any update.
            answer = await engine.generate((1,), sampling=sampling(2))
            assert answer.versions == (2, 2)
        finally:
            await engine.close()

    run(check())


@pytest.mark.process
def test_servers_end_with_their_owner_however_it_dies(python: str, tmp_path: Path) -> None:
    async def check() -> None:
        launch = Launch(
            command=(python, "--served-model-name", "x", "--uds", str(tmp_path / "s")),
            environment=dict(os.environ),
            address=f"unix:{tmp_path / 's'}",
            identity="x",
        )
        process = ServerProcess(launch, log_path=tmp_path / "log")
        await process.start()
        guard = process._process
        assert guard is not None
        while not children(guard.pid):
            await asyncio.sleep(0.02)
        (server,) = children(guard.pid)
        # What a killed owner leaves behind is a closed pipe, and nothing else.
        assert guard.stdin is not None
        guard.stdin.close()
        assert await process.wait() == 128 + signal.SIGTERM
        assert not members(server)

    run(check())


def test_small_heads_are_refused_before_vllm_crashes_on_them(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        config = {"hidden_size": 64, "num_attention_heads": 4}
        (directory / "config.json").write_bytes(msgspec.json.encode(config))

    publish_directory(tmp_path / "v0", version=0, step=0, write=write)
    options = VllmOptions(
        num_servers=1, python="python", context_tokens=64, dtype="float32", max_batch=1
    )

    async def check() -> None:
        engine = VllmEngine(options, path=tmp_path / "v0", version=0)
        with pytest.raises(EngineError, match="heads of size 16"):
            await engine.start()
        await engine.close()

    run(check())


def test_each_server_has_gpus_of_its_own(tmp_path: Path) -> None:
    options = VllmOptions(
        num_servers=2, python="python", context_tokens=64, dtype="bfloat16", max_batch=1,
        tensor_parallel=2, num_gpus=4,
    )  # fmt: skip
    base = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "RANK": "3", "HOME": "/h"}
    made = vllm_environment(options, slot=1, plugin=tmp_path, base=base)
    assert made["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert "RANK" not in made
    with pytest.raises(EngineError, match=r"needs more than the 4 GPUs"):
        vllm_environment(options, slot=2, plugin=tmp_path, base=base)


def test_an_image_gets_the_policy_directory_and_the_gpus(tmp_path: Path) -> None:
    options = VllmOptions(
        num_servers=1, python="python3", context_tokens=64, dtype="bfloat16", max_batch=1,
        image="vllm.sif", num_gpus=1, arguments=("--seed", "1"),
    )  # fmt: skip
    command = vllm_command(
        options, path=Path("/run/policy/v0"), address="unix:/sock/a", identity="p",
        plugin=Path("/plugin"),
    )  # fmt: skip
    assert command[:3] == ("apptainer", "exec", "--nv")
    binds = [command[i + 1] for i, part in enumerate(command) if part == "--bind"]
    assert binds == ["/run/policy", "/plugin", "/sock"]
    assert command[-2:] == ("--seed", "1")


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_on_cpus_prompts_are_never_read_in_parts(num_gpus: int) -> None:
    """vLLM 0.32 dies of that there, where requests have seeds, as all of ours."""
    options = VllmOptions(
        num_servers=1, python="python3", context_tokens=64, dtype="float32", max_batch=1,
        num_gpus=num_gpus,
    )  # fmt: skip
    command = vllm_command(
        options, path=Path("/v0"), address="unix:/a", identity="p", plugin=Path("/plugin")
    )
    assert ("--no-enable-chunked-prefill" in command) == (num_gpus == 0)
