"""The vLLM engine against real vLLM (its CPU build) and a real small model of random weights.

Needs `PRORL_VLLM_PYTHON`: the interpreter of an environment that holds vLLM.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hpc.groups import members
from prorl_hpc.inference.engine import Chunk, Completion, Sampling
from prorl_hpc.inference.http import Channel, RequestRefused
from prorl_hpc.inference.openai_engine import OpenAiEngine
from prorl_hpc.inference.supervise import ServerProcess
from prorl_hpc.inference.vllm_engine import VllmEngine, VllmOptions
from prorl_hpc.run import Run
from tests.fakes.tiny_model import publish_tiny, tiny_model

PYTHON = os.environ.get("PRORL_VLLM_PYTHON", "")
BOUND_SECONDS = 540.0
TOLERANCE = 1e-3
"""Of a float32 log-probability against a transformers forward pass on the same ids: kernels sum
in another order, over up to 500 tokens of a model whose logits are large (seen: 3e-4)."""

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="PRORL_VLLM_PYTHON names no interpreter with vLLM"),
]


def run(test: object) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_SECONDS):
            await test  # type: ignore[misc]

    asyncio.run(bounded())


@asynccontextmanager
async def started(
    run_: Run, *, tied: bool, on_port: bool = False, arguments: tuple[str, ...] = ()
) -> AsyncIterator[VllmEngine]:
    options = VllmOptions(
        num_servers=1,
        python=PYTHON,
        context_tokens=512,
        dtype="float32",
        max_batch=32,
        start_seconds=400.0,
        log_directory=run_.root / "logs",
        arguments=arguments,
    )
    path = publish_tiny(run_, version=1, tied=tied)
    engine = VllmEngine(options, path=path.resolve(), version=1)
    engine.fleet._use_ports = on_port
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def forward(
    prompt: tuple[int, ...], answer: Completion, *, seed: int, tied: bool, temperature: float
) -> list[float]:
    """`of_network` for a model of random weights."""
    return of_network(tiny_model(seed=seed, tied=tied), prompt, answer, temperature=temperature)


def of_network(
    network: Any, prompt: tuple[int, ...], answer: Completion, *, temperature: float
) -> list[float]:
    """Log-probabilities of the answer's tokens by transformers, at the sampler's temperature."""
    import torch

    ids = torch.tensor([[*prompt, *answer.token_ids]])
    with torch.no_grad():
        logits_TV = network(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
    chosen_T1 = torch.tensor(answer.token_ids).unsqueeze(1)
    return [float(value) for value in logprobs_TV.gather(1, chosen_T1).squeeze(1)]


def asked(n: int, *, seed: int, temperature: float = 0.7) -> Sampling:
    return Sampling(temperature=temperature, max_new_tokens=n, seed=seed, stop_token_ids=(1,))


def distance(one: tuple[float, ...], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_versions_update_in_flight_and_refusals(tmp_path: Path, tied: bool) -> None:
    async def check() -> None:
        run_ = Run(tmp_path / "run")
        async with started(run_, tied=tied) as engine:
            prompt = (5, 6, 7, 8)
            answers = await asyncio.gather(
                *(engine.generate(prompt, sampling=asked(64, seed=s)) for s in range(4))
            )
            for answer in answers:
                exact = forward(prompt, answer, seed=1, tied=tied, temperature=0.7)
                assert distance(answer.logprobs, exact) < TOLERANCE
                assert set(answer.versions) == {1}
            assert len({answer.token_ids for answer in answers}) == 4

            # Moved to another version while it generates: each token says who made it.
            requests = [
                asyncio.create_task(
                    engine.generate(
                        prompt,
                        sampling=Sampling(temperature=0.7, max_new_tokens=500, seed=s),
                    )
                )
                for s in range(8)
            ]
            await asyncio.sleep(0.3)
            await engine.load(2, path=publish_tiny(run_, version=2, tied=tied))
            moved = await asyncio.gather(*requests)
            assert all(list(a.versions) == sorted(a.versions) for a in moved)
            mixed = [a for a in moved if set(a.versions) == {1, 2}]
            assert mixed
            for answer in mixed:
                old = forward(prompt, answer, seed=1, tied=tied, temperature=0.7)
                new = forward(prompt, answer, seed=2, tied=tied, temperature=0.7)
                want = [o if v == 1 else n for o, n, v in
                        zip(old, new, answer.versions, strict=True)]  # fmt: skip
                assert distance(answer.logprobs, want) < TOLERANCE

            answer = await engine.generate(prompt, sampling=asked(64, seed=9))
            exact = forward(prompt, answer, seed=2, tied=tied, temperature=0.7)
            assert distance(answer.logprobs, exact) < TOLERANCE
            assert set(answer.versions) == {2}

            with pytest.raises(RequestRefused, match="out of vocabulary"):
                await engine.generate((99_999,), sampling=asked(1, seed=0))
            with pytest.raises(RequestRefused, match="answered 400"):
                await engine.generate((5,) * 600, sampling=asked(1, seed=0))

    run(check())


async def metric(address: str, name: str) -> float:
    """One of vLLM's own metrics, summed over its labels."""
    channel = Channel(address)
    try:
        text = (await channel.get("/metrics", timeout_seconds=60)).decode()
    finally:
        await channel.close()
    lines = [line for line in text.splitlines() if line.startswith(f"vllm:{name}")]
    assert lines
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def tokens_of_a_cancelled(engine: VllmEngine, *, streamed: bool) -> float:
    """Tokens that the server makes for a request of 500 whose client leaves at once."""
    (address,) = engine.pool.servers
    prompt, endless = (5, 6, 7, 8), Sampling(temperature=0.7, max_new_tokens=500, seed=4)
    before = await metric(address, "generation_tokens_total")
    if streamed:
        async with aclosing(engine.stream(prompt, sampling=endless)) as stream:
            async for _ in stream:
                break
    else:
        request = asyncio.create_task(engine.generate(prompt, sampling=endless))
        await asyncio.sleep(0.05)
        request.cancel()
    # Gauges move with steps of the engine only: a request of one token makes one.
    while True:
        await engine.generate(prompt, sampling=asked(1, seed=0))
        if not await metric(address, "num_requests_running"):
            return await metric(address, "generation_tokens_total") - before


async def streamed_over(engine: VllmEngine, run_: Run, *, version: int) -> Completion:
    """500 tokens as they came, while the engine is moved to `version`."""
    made: list[Chunk] = []
    load: asyncio.Task[None] | None = None
    path = publish_tiny(run_, version=version)
    endless = Sampling(temperature=0.7, max_new_tokens=500, seed=4)
    async for chunk in engine.stream((5, 6, 7, 8), sampling=endless):
        made.append(chunk)
        if load is None:
            load = asyncio.create_task(engine.load(version, path=path))
    assert load is not None
    await load
    return Completion(
        token_ids=tuple(t for c in made for t in c.token_ids),
        logprobs=tuple(x for c in made for x in c.logprobs),
        versions=tuple(v for c in made for v in c.versions),
        finish_reason="length",
    )


def test_streams_cancelling_and_its_openai_face(tmp_path: Path) -> None:
    async def check() -> None:
        run_ = Run(tmp_path / "run")
        async with started(run_, tied=True, on_port=True) as engine:
            prompt = (5, 6, 7, 8)
            (address,) = engine.pool.servers

            # A stream over an update: versions as they came agree with vLLM's account at the end.
            # An update may come after the last of 500 tokens: then the next one is tried.
            for last in range(2, 10):
                whole = await streamed_over(engine, run_, version=last)
                if set(whole.versions) == {last - 1, last}:
                    break
            assert set(whole.versions) == {last - 1, last}
            assert list(whole.versions) == sorted(whole.versions)
            assert len(whole.token_ids) == 500
            old = forward(prompt, whole, seed=last - 1, tied=True, temperature=0.7)
            new = forward(prompt, whole, seed=last, tied=True, temperature=0.7)
            want = [o if v < last else n for o, n, v in zip(old, new, whole.versions, strict=True)]
            assert distance(whole.logprobs, want) < TOLERANCE

            # Whoever goes away frees its request: seen at once, or at least sooner than its end.
            for streamed in (True, False):
                made_for = [await tokens_of_a_cancelled(engine, streamed=streamed)]
                while made_for[-1] >= 400 and len(made_for) < 5:
                    made_for.append(await tokens_of_a_cancelled(engine, streamed=streamed))
                assert made_for[-1] < 400, made_for

            # The same server as an endpoint of others.
            theirs = OpenAiEngine([f"{address}/v1"], tokenizer_path=run_.policy(last), version=last)
            await theirs.start()
            try:
                answer = await theirs.generate(prompt, sampling=asked(32, seed=9))
                exact = forward(prompt, answer, seed=last, tied=True, temperature=0.7)
                assert distance(answer.logprobs, exact) < TOLERANCE
                chunks = [c async for c in theirs.stream(prompt, sampling=asked(32, seed=9))]
                assert sum((c.token_ids for c in chunks), ()) == answer.token_ids
                assert chunks[-1].finish_reason == answer.finish_reason
            finally:
                await theirs.close()

    run(check())


def test_prompts_beyond_one_step_do_not_end_the_engine(tmp_path: Path) -> None:
    """Eight prompts of 400 tokens, all at once, where a step takes 512: none is read in parts."""

    async def check() -> None:
        run_ = Run(tmp_path / "run")
        more = ("--max-num-batched-tokens", "512")
        async with started(run_, tied=True, arguments=more) as engine:
            answers = await asyncio.gather(
                *(engine.generate((5, 6) * 200, sampling=asked(8, seed=s)) for s in range(8))
            )
            assert all(answer.token_ids for answer in answers)
            assert engine.pool.num_lost == 0

    run(check())


def test_a_killed_server_is_replaced_without_losing_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[ServerProcess] = []
    start = ServerProcess.start

    async def noted(self: ServerProcess) -> None:
        await start(self)
        processes.append(self)

    monkeypatch.setattr(ServerProcess, "start", noted)

    async def check() -> None:
        run_ = Run(tmp_path / "run")
        async with started(run_, tied=True) as engine:
            requests = [
                asyncio.create_task(engine.generate(
                    (5, 6, 7), sampling=Sampling(temperature=1.0, max_new_tokens=400, seed=s)
                ))
                for s in range(8)
            ]  # fmt: skip
            await asyncio.sleep(0.2)
            guard = processes[0]._process
            assert guard is not None
            children = Path(f"/proc/{guard.pid}/task/{guard.pid}/children").read_text().split()
            os.killpg(int(children[0]), signal.SIGKILL)
            answers = await asyncio.gather(*requests)
            assert [len(a.token_ids) for a in answers] == [400] * 8
            assert engine.pool.num_retries >= 8
            assert len(processes) == 2
        group = int(children[0])
        assert not members(group)
        assert all(process.exit_code is not None for process in processes)

    run(check())
