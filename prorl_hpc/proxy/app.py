"""The routes of an episode's API. Translates between HTTP and a capture; decides nothing.

POST /v1/chat/completions   GET /v1/models          as OpenAI has it
POST /v1/messages   POST /v1/messages/count_tokens  as Anthropic has it
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path
from types import ModuleType

import msgspec

from prorl_hpc.proxy import anthropic, openai
from prorl_hpc.proxy.capture import Capture, Prepared
from prorl_hpc.proxy.chat import Refused
from prorl_hpc.proxy.server import Reply, Request, SocketServer

KEEP_ALIVE_SECONDS = 10.0
STREAM = {"content-type": "text/event-stream", "cache-control": "no-cache"}

CHAT, MODELS, MESSAGES = "/v1/chat/completions", "/v1/models", "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"


def serve_episode(capture: Capture, path: Path, **bounds: int) -> SocketServer:
    """The server of one episode on the socket `path`."""
    return SocketServer(path, handler=App(capture), problem=_problem, **bounds)


class App:
    """Handles the requests of one episode."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    async def __call__(self, request: Request) -> Reply:
        api = anthropic if request.path.startswith(MESSAGES) else openai
        try:
            return await self._route(request, api)
        except Refused as err:
            return _json(api.problem(err), status=err.status)
        except RecursionError:  # it could just be read, and not be written again
            deep = Refused(400, "the body is nested too deeply")
            return _json(api.problem(deep), status=deep.status)

    async def _route(self, request: Request, api: ModuleType) -> Reply:
        path = request.path
        if path in (CHAT, MESSAGES, COUNT):
            _need(request, "POST")
            ask = api.read_request(request.body)
            if path == COUNT:
                return _json({"input_tokens": self._capture.count(ask)})
            prepared = self._capture.prepare(ask)
            if ask.stream:
                return Reply(status=200, body=self._stream(prepared, api), headers=STREAM)
            return _json(api.body(ask, await self._capture.answer(prepared)))
        if path == MODELS:
            _need(request, "GET", "HEAD")
            return _json(openai.models())
        if path.startswith(f"{MODELS}/"):
            _need(request, "GET", "HEAD")
            return _json(openai.model(path.removeprefix(f"{MODELS}/")))
        raise Refused(404, f"there is nothing at {path[:200]!r}", code="not_found")

    async def _stream(self, prepared: Prepared, api: ModuleType) -> AsyncGenerator[bytes, None]:
        """Events as the text comes; comments in between, so that nobody thinks the line is dead."""
        events = api.Events(prepared.ask, prompt_tokens=len(prepared.prompt_ids))
        pieces: deque[tuple[int, str]] = deque()
        news = asyncio.Event()

        def tell(number: int, piece: str) -> None:
            pieces.append((number, piece))
            news.set()

        work = asyncio.ensure_future(self._capture.answer(prepared, tell=tell))
        work.add_done_callback(lambda _: news.set())
        try:
            while not work.done() or pieces:
                while pieces:
                    for event in events.text(*pieces.popleft()):
                        yield event
                if not work.done() and not await _within(KEEP_ALIVE_SECONDS, news):
                    yield b": the model is at work\n\n"
                news.clear()
            try:
                answer = work.result()
            except Refused as err:
                name = "error" if api is anthropic else ""
                yield openai.event(api.problem(err), name=name)
                return
            for event in events.end(answer):
                yield event
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, Refused):
                await work


async def _within(seconds: float, news: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await news.wait()
    except TimeoutError:
        return False
    return True


def _need(request: Request, *methods: str) -> None:
    if request.method not in methods:
        raise Refused(405, f"{request.method[:20]} isn't allowed here; use {methods[0]}")


def _json(data: object, *, status: int = 200) -> Reply:
    return Reply(status=status, body=msgspec.json.encode(data))


def _problem(status: int, message: str) -> Reply:
    return _json(openai.problem(Refused(status, message)), status=status)
