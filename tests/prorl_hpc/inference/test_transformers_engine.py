"""The transformers engine against fresh forward passes of the same weights."""

import asyncio
import json
import threading
import time
from contextlib import aclosing

import pytest

torch = pytest.importorskip("torch")

from prorl_hpc.inference.engine import EngineError, Sampling  # noqa: E402
from prorl_hpc.inference.http import RequestRefused  # noqa: E402
from prorl_hpc.inference.transformers_engine import TransformersEngine  # noqa: E402
from prorl_hpc.run import Run  # noqa: E402
from tests.fakes.tiny_model import publish_tiny  # noqa: E402

torch.set_num_threads(1)

PROMPTS = [(5, 6, 7, 4), (8, 4), (9, 10, 11, 12, 13, 14, 15, 4), (20, 21, 4), (5, 6, 7, 4)]


def sampling(**values):
    return Sampling(**({"temperature": 1.2, "max_new_tokens": 12, "seed": 3} | values))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("run"))
    for version in (0, 1):
        publish_tiny(run, version=version)
    publish_tiny(run, version=2, seed=1, tied=False)
    return run


def fresh_logprobs(run, version, prompt, tokens, temperature):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(run.policy(version)), dtype=torch.float32)
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].float() / temperature, dim=-1)
    return [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(tokens)]


def with_engine(run, body, **options):
    async def main():
        engine = TransformersEngine(path=run.policy(0), version=0, **options)
        await engine.start()
        try:
            return await asyncio.wait_for(body(engine), 400)
        finally:
            await engine.close()

    return asyncio.run(main())


def test_logprobs_equal_a_fresh_forward_pass(run):
    async def body(engine):
        return await asyncio.gather(
            *(
                engine.generate(p, sampling=sampling(seed=i, max_new_tokens=4 + 5 * i))
                for i, p in enumerate(PROMPTS)
            )
        )

    for prompt, done in zip(PROMPTS, with_engine(run, body, max_batch=3), strict=True):
        assert len(done.token_ids) == len(done.logprobs) == len(done.versions)
        want = fresh_logprobs(run, 0, prompt, done.token_ids, 1.2)
        assert done.logprobs == pytest.approx(want, abs=1e-4)
        assert done.finish_reason == "length"


def test_a_stop_token_ends_the_completion_and_is_part_of_it(run):
    async def body(engine):
        free = await engine.generate(PROMPTS[0], sampling=sampling())
        stop = free.token_ids[3]
        return free, await engine.generate(PROMPTS[0], sampling=sampling(stop_token_ids=(stop,)))

    free, stopped = with_engine(run, body)
    first = free.token_ids.index(free.token_ids[3])
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"


def test_greedy_takes_the_most_likely_token(run):
    async def body(engine):
        return await engine.generate(PROMPTS[2], sampling=sampling(temperature=0))

    done = with_engine(run, body)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(run.policy(0)), dtype=torch.float32)
    ids = list(PROMPTS[2])
    for token in done.token_ids:
        with torch.no_grad():
            assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)


def test_deterministic_tokens_are_bit_identical_whatever_runs_beside(run):
    async def alone(engine):
        return await engine.generate(PROMPTS[0], sampling=sampling())

    async def crowded(engine):
        done = await asyncio.gather(
            *(engine.generate(p, sampling=sampling(seed=9 - i)) for i, p in enumerate(PROMPTS)),
            engine.generate(PROMPTS[0], sampling=sampling()),
        )
        return done[-1]

    first = with_engine(run, alone, deterministic=True)
    second = with_engine(run, crowded, deterministic=True)
    assert first == second  # logprobs as well, to the last bit


def hold_until_swap(engine, *, after_steps):
    """Makes the decode thread wait, once, until a new version stands ready."""
    batch = engine._batch
    step, count, reached = batch.step, iter(range(1_000_000)), threading.Event()

    def held():
        step()
        if next(count) == after_steps:
            reached.set()
            deadline = time.monotonic() + 300
            while engine._swap is None and time.monotonic() < deadline:
                time.sleep(0.001)

    batch.step = held
    return reached


def test_a_version_loaded_in_flight_is_stamped_on_each_token(run):
    async def body(engine):
        reached = hold_until_swap(engine, after_steps=20)
        requests = [
            asyncio.create_task(engine.generate(p, sampling=sampling(max_new_tokens=40)))
            for p in (PROMPTS[2], PROMPTS[1])
        ]
        assert await asyncio.to_thread(reached.wait, 60)
        await engine.load(1, path=run.policy(1))
        assert engine.version == 1
        return await asyncio.gather(*requests)

    for prompt, done in zip(
        (PROMPTS[2], PROMPTS[1]), with_engine(run, body, max_batch=2), strict=True
    ):
        switch = done.versions.index(1)
        assert switch >= 20
        assert list(done.versions) == [0] * switch + [1] * (40 - switch)
        old = fresh_logprobs(run, 0, prompt, done.token_ids, 1.2)
        new = fresh_logprobs(run, 1, prompt, done.token_ids, 1.2)
        assert done.logprobs == pytest.approx(old[:switch] + new[switch:], abs=1e-4)


def test_cancelled_requests_make_room(run):
    async def body(engine):
        long = [
            asyncio.create_task(engine.generate(p, sampling=sampling(max_new_tokens=100_000)))
            for p in PROMPTS[:2]
        ]
        await asyncio.sleep(0)
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        return await engine.generate(PROMPTS[0], sampling=sampling())

    assert len(with_engine(run, body, max_batch=2).token_ids) == 12


def test_a_stream_is_the_answer_in_chunks(run):
    async def body(engine):
        whole = await engine.generate(PROMPTS[0], sampling=sampling())
        chunks = [c async for c in engine.stream(PROMPTS[0], sampling=sampling())]
        return whole, chunks

    whole, chunks = with_engine(run, body)
    assert len(chunks) == 12
    assert sum((c.token_ids for c in chunks), ()) == whole.token_ids
    assert sum((c.logprobs for c in chunks), ()) == pytest.approx(whole.logprobs, abs=1e-5)
    assert [c.finish_reason for c in chunks] == [None] * 11 + ["length"]


def test_a_stream_stamps_tokens_with_the_version_that_made_them(run):
    async def body(engine):
        got = []
        async for chunk in engine.stream(PROMPTS[2], sampling=sampling(max_new_tokens=60)):
            got.append(chunk)
            if len(got) == 1:
                await engine.load(1, path=run.policy(1))
        return got

    chunks = with_engine(run, body)
    tokens = [t for c in chunks for t in c.token_ids]
    versions = [v for c in chunks for v in c.versions]
    assert versions == sorted(versions)
    old = fresh_logprobs(run, 0, PROMPTS[2], tokens, 1.2)
    new = fresh_logprobs(run, 1, PROMPTS[2], tokens, 1.2)
    want = [o if v == 0 else n for o, n, v in zip(old, new, versions, strict=True)]
    assert [x for c in chunks for x in c.logprobs] == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_cancelled_request_gives_its_row_up(run, streamed):
    async def body(engine):
        endless = sampling(max_new_tokens=1_000_000)
        if streamed:
            async with aclosing(engine.stream(PROMPTS[0], sampling=endless)) as stream:
                async for _ in stream:
                    break
        else:
            task = asyncio.create_task(engine.generate(PROMPTS[0], sampling=endless))
            while not engine._batch.rows:
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        while engine._batch.rows:
            await asyncio.sleep(0.005)
        assert engine._batch._cache is None
        return await engine.generate(PROMPTS[1], sampling=sampling())

    assert len(with_engine(run, body).token_ids) == 12


def test_a_stream_ends_with_the_engines_error(run):
    async def body(engine):
        async for _ in engine.stream(PROMPTS[0], sampling=sampling(max_new_tokens=1_000_000)):
            closing = asyncio.create_task(engine.close())
            break_off.append(closing)

    break_off = []

    async def main():
        engine = TransformersEngine(path=run.policy(0), version=0)
        await engine.start()
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(body(engine), 400)
        await asyncio.gather(*break_off)

    asyncio.run(main())


def test_a_version_that_does_not_fit_leaves_the_old_one(run):
    async def body(engine):
        with pytest.raises(EngineError, match="don't fit"):
            await engine.load(2, path=run.policy(2))
        with pytest.raises(EngineError, match="holds version 1"):
            await engine.load(7, path=run.policy(1))
        return engine.version, await engine.generate(PROMPTS[0], sampling=sampling())

    version, done = with_engine(run, body)
    assert version == 0
    want = fresh_logprobs(run, 0, PROMPTS[0], done.token_ids, 1.2)
    assert done.logprobs == pytest.approx(want, abs=1e-4)


def test_a_damaged_version_is_refused(tmp_path):
    run = Run(tmp_path)
    publish_tiny(run, version=0)
    path = publish_tiny(run, version=1)
    weights = path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)

    async def body(engine):
        with pytest.raises(EngineError, match="damaged"):
            await engine.load(1, path=path)

    with_engine(run, body)


def test_whoever_loads_hears_of_a_step_that_failed_before_the_swap(run):
    async def body(engine):
        def broken(_):
            raise RuntimeError("the device is lost")

        engine._batch.leave = broken
        with pytest.raises(EngineError, match="the device is lost"):
            await engine.load(1, path=run.policy(1))

    with_engine(run, body)


@pytest.mark.parametrize("prompt", [(), (5, 10_000)])
def test_requests_that_cannot_be_served(run, prompt):
    async def body(engine):
        with pytest.raises(RequestRefused):  # by any other engine too
            await engine.generate(prompt, sampling=sampling())

    with_engine(run, body)


def test_a_directory_without_a_model_says_so(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonsense"}))

    async def main():
        with pytest.raises(EngineError, match="can't be loaded"):
            await TransformersEngine(path=tmp_path, version=0).start()

    asyncio.run(main())


def test_closing_fails_what_is_in_flight(run):
    async def main():
        engine = TransformersEngine(path=run.policy(0), version=0)
        await engine.start()
        task = asyncio.create_task(
            engine.generate(PROMPTS[0], sampling=sampling(max_new_tokens=100_000))
        )
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await task

    asyncio.run(main())
