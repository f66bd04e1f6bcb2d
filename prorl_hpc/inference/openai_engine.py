"""Endpoints that others run as one engine: for `eval` and `serve`. Starts no process.

They can't follow the learner's versions, so `submit` refuses them (`relations.check_trainable`).
An endpoint that is lost is looked for until it answers again.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from prorl_hpc.inference.engine import Chunk, Completion, EngineError, Sampling
from prorl_hpc.inference.http_pool import HttpPool
from prorl_hpc.inference.openai_server import Dialect, OpenAiServer, Words
from prorl_hpc.recipe import Recipe
from prorl_hpc.relations import check_engine

log = logging.getLogger("prorl_hpc.inference")

LOOK_AGAIN_SECONDS = 5.0


class OpenAiEngine:
    """Spreads requests over endpoints."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        tokenizer_path: Path,
        version: int,
        model: str | None = None,
        key: str = "",
        request_seconds: float = 1800.0,
        look_again_seconds: float = LOOK_AGAIN_SECONDS,
    ) -> None:
        self._urls = tuple(urls)
        self._tokenizer_path = tokenizer_path
        self._model = model
        self._key = key
        self._request_seconds = request_seconds
        self._look_again_seconds = look_again_seconds
        self._words: Words | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.pool = HttpPool(version=version, lost=lambda server: self._lost(server.address))

    @property
    def version(self) -> int:
        return self.pool.version

    async def start(self) -> None:
        """Meets every endpoint; raises EngineError when one of them can't be used."""
        self._words = await asyncio.to_thread(read_words, self._tokenizer_path)
        await self.pool.start()
        for url in self._urls:
            server = await self._meet(url)
            if server.dialect is Dialect.text:
                log.warning(
                    "%s gives no token ids: its answers are tokenised here and their "
                    "log-probabilities are 0; fit for scores, not for training",
                    url,
                )

    async def generate(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> Completion:
        return await self.pool.generate(prompt_ids, sampling=sampling, affinity=affinity)

    def stream(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        return self.pool.stream(prompt_ids, sampling=sampling, affinity=affinity)

    async def load(self, version: int, *, path: Path) -> None:  # noqa: ARG002
        raise EngineError(
            f"version {version} can't be loaded: {', '.join(self._urls)} are run by others"
        )

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.pool.close()

    async def _meet(self, url: str) -> OpenAiServer:
        assert self._words is not None
        server = OpenAiServer(
            url,
            version=self.version,
            words=self._words,
            model=self._model,
            key=self._key,
            request_seconds=self._request_seconds,
        )
        try:
            await server.meet()
            await self.pool.join(server)
        except BaseException:
            await server.close()
            raise
        return server

    def _lost(self, url: str) -> None:
        task = asyncio.get_running_loop().create_task(self._look_again(url))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look_again(self, url: str) -> None:
        while True:
            await asyncio.sleep(self._look_again_seconds)
            try:
                await self._meet(url)
            except EngineError as err:
                log.warning("%s", err)
            else:
                log.info("%s answers again", url)
                return


def make_openai(recipe: Recipe, *, path: Path, version: int) -> OpenAiEngine:
    """The engine of a recipe; `path` holds the tokenizer. Raises RecipeError without addresses."""
    engine = recipe.rollout.engine
    check_engine(engine)
    return OpenAiEngine(
        [url.rstrip("/") for url in engine.urls],
        tokenizer_path=path,
        version=version,
        model=engine.model,
        key=os.environ.get(engine.key_variable, ""),
        request_seconds=engine.request_seconds,
    )


def read_words(path: Path) -> Words:
    """The tokenizer in `path`."""
    from prorl_hpc.agents.render import load_tokenizer

    tokenizer = load_tokenizer(path)
    return Words(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        decode=lambda ids: str(
            tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        ),
    )
