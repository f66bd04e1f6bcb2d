"""The openai engine against a fake endpoint of each dialect; a real one is in `test_vllm_real`."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from prorl_hpc.agents.characters import build_character_tokenizer
from prorl_hpc.choices import EngineKind
from prorl_hpc.inference.engine import EngineError, Sampling
from prorl_hpc.inference.openai_engine import OpenAiEngine
from prorl_hpc.inference.pool import make_engine
from prorl_hpc.recipe import RecipeError
from prorl_hpc.relations import check_trainable
from tests.fakes.openai_server import Endpoint
from tests.fakes.tiny_model import CHARACTERS
from tests.prorl_hpc.rollout.helpers import make_recipe

BOUND_SECONDS = 300.0
Make = Callable[..., Endpoint]


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_character_tokenizer(CHARACTERS).save_pretrained(path)
    return path


@pytest.fixture
def endpoint() -> Iterator[Make]:
    made: list[Endpoint] = []

    def make(dialect: str, **more: object) -> Endpoint:
        made.append(Endpoint(dialect=dialect, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.stop()


def with_engine(
    tokenizer_path: Path, urls: list[str], body: Callable[..., object], **more: object
) -> object:
    async def main() -> object:
        engine = OpenAiEngine(urls, tokenizer_path=tokenizer_path, version=4, **more)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(BOUND_SECONDS):
                await engine.start()
                return await body(engine)  # type: ignore[misc]
        finally:
            await engine.close()

    return asyncio.run(main())


def asked(n: int, *, stops: tuple[int, ...] = ()) -> Sampling:
    return Sampling(temperature=0.7, max_new_tokens=n, seed=2**40, stop_token_ids=stops)


def test_ids_come_back_as_they_were_where_the_endpoint_gives_them(
    tokenizer_path: Path, endpoint: Make
) -> None:
    server = endpoint("tokens")

    async def body(engine: OpenAiEngine) -> None:
        answer = await engine.generate((5, 6, 7), sampling=asked(9, stops=(5,)))
        assert answer.token_ids == (3, 4, 5)
        assert answer.logprobs == (-0.25,) * 3
        assert (answer.versions, answer.finish_reason) == ((4,) * 3, "stop")
        chunks = [c async for c in engine.stream((5, 6, 7), sampling=asked(4))]
        assert [t for c in chunks for t in c.token_ids] == [3, 4, 5, 6]
        assert [c.finish_reason for c in chunks] == [None, None, None, "length"]

    with_engine(tokenizer_path, [server.url], body)
    request = server.requests[1]
    assert (request["model"], request["prompt"]) == ("their-model", [5, 6, 7])
    assert (request["temperature"], request["max_tokens"]) == (0.7, 9)


def test_an_endpoint_of_text_is_spoken_to_in_text(
    tokenizer_path: Path, endpoint: Make, caplog: pytest.LogCaptureFixture
) -> None:
    server = endpoint("text", answer="12+3")
    tokenizer = build_character_tokenizer(CHARACTERS)
    prompt = tuple(tokenizer.encode("say 4", add_special_tokens=False))
    stop = int(tokenizer.eos_token_id)

    async def body(engine: OpenAiEngine) -> None:
        answer = await engine.generate(prompt, sampling=asked(9, stops=(stop,)))
        # The stop token that ended it is part of an answer, as with every engine.
        assert tokenizer.decode(answer.token_ids[:-1]) == "12+3"
        assert (answer.token_ids[-1], answer.finish_reason) == (stop, "stop")
        assert answer.logprobs == (0.0,) * 5
        chunks = [c async for c in engine.stream(prompt, sampling=asked(9, stops=(stop,)))]
        assert [c.token_ids for c in chunks] == [answer.token_ids]

    with_engine(tokenizer_path, [server.url], body)
    request = server.requests[-1]
    assert request["prompt"] == "say 4"
    assert request["stop"] == [tokenizer.decode([stop])]
    assert request["seed"] == 2**40 % 2**31
    assert "gives no token ids" in caplog.text


@pytest.mark.parametrize(
    ("dialect", "more", "words"),
    [
        ("chat", {}, r"needs the completions API.*404"),
        ("tokens", {"key": "secret"}, r"401.*rollout\.engine\.key_variable"),
    ],
)
def test_an_endpoint_that_can_not_be_used_says_why(
    tokenizer_path: Path, endpoint: Make, dialect: str, more: dict[str, str], words: str
) -> None:
    server = endpoint(dialect, **more)

    async def body(engine: OpenAiEngine) -> None:
        raise AssertionError("it started")

    with pytest.raises(EngineError, match=words):
        with_engine(tokenizer_path, [server.url], body)


def test_the_key_comes_from_the_environment(
    tokenizer_path: Path, endpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = endpoint("tokens", key="secret")
    monkeypatch.setenv("MY_KEY", "secret")
    recipe = make_recipe()
    recipe.rollout.engine.kind = EngineKind.openai
    recipe.rollout.engine.urls = [f"{server.url}/"]
    recipe.rollout.engine.key_variable = "MY_KEY"

    async def main() -> int:
        engine = make_engine(recipe, path=tokenizer_path, version=0)
        async with asyncio.timeout(BOUND_SECONDS):
            await engine.start()
            try:
                return len((await engine.generate((1,), sampling=asked(3))).token_ids)
            finally:
                await engine.close()

    assert asyncio.run(main()) == 3


def test_cancelling_closes_the_connection_and_the_endpoint_sees_it(
    tokenizer_path: Path, endpoint: Make
) -> None:
    server = endpoint("tokens", token_seconds=0.01)

    async def body(engine: OpenAiEngine) -> None:
        async with aclosing(engine.stream((1,), sampling=asked(100_000))) as stream:
            async for _ in stream:
                break
        while server.running:
            await asyncio.sleep(0.01)
        assert server.aborted == 1
        request = asyncio.create_task(engine.generate((1,), sampling=asked(100_000)))
        while not server.running:
            await asyncio.sleep(0.01)
        request.cancel()
        while server.running:
            await asyncio.sleep(0.01)
        assert server.aborted == 2

    with_engine(tokenizer_path, [server.url], body)


def test_a_lost_endpoint_is_taken_back_when_it_answers_again(
    tokenizer_path: Path, endpoint: Make
) -> None:
    one, other = endpoint("tokens"), endpoint("tokens")

    async def body(engine: OpenAiEngine) -> None:
        (lost,) = [s for a, s in engine.pool._servers.items() if a == one.url]
        engine.pool._lose(lost, "told so by the test")
        assert engine.pool.servers == (other.url,)
        while len(engine.pool.servers) < 2:
            await asyncio.sleep(0.01)
        assert sorted(engine.pool.servers) == sorted([one.url, other.url])

    with_engine(tokenizer_path, [one.url, other.url], body, look_again_seconds=0.01)


def test_weights_can_not_be_changed_so_training_is_refused(tokenizer_path: Path) -> None:
    recipe = make_recipe()
    recipe.rollout.engine.kind = EngineKind.openai
    with pytest.raises(RecipeError, match=r"rollout\.engine\.urls=\[http"):
        make_engine(recipe, path=tokenizer_path, version=0)
    recipe.rollout.engine.urls = ["http://127.0.0.1:9/v1"]
    with pytest.raises(RecipeError, match="openai can't train"):
        check_trainable(recipe)
    engine = make_engine(recipe, path=tokenizer_path, version=0)
    with pytest.raises(EngineError, match="run by others"):
        asyncio.run(engine.load(1, path=tokenizer_path))
    for kind in (EngineKind.transformers, EngineKind.vllm, EngineKind.sglang):
        recipe.rollout.engine.kind = kind
        check_trainable(recipe)


@pytest.mark.process
def test_an_endpoint_is_evaluated_like_a_model(
    tokenizer_path: Path, endpoint: Make, tmp_path: Path
) -> None:
    pytest.importorskip("reasoning_gym")
    from prorl_hpc.evaluation.evaluate import evaluate

    server = endpoint("text", answer="7")
    recipe = make_recipe()
    recipe.rollout.engine.kind = EngineKind.openai
    recipe.rollout.engine.urls = [server.url]
    result = asyncio.run(
        evaluate(
            recipe,
            model=tokenizer_path,
            target="theirs",
            num_samples=1,
            ks=[1],
            scratch=tmp_path,
        )
    )
    score = result.tasks["sums"]
    assert (score.instances, score.failures) == (8, 0)
    # Some sums of two digits are 7, most aren't.
    assert 0 <= score.pass_at[1].mean < 1
