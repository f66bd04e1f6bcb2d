"""An episode's API on a real Unix socket, with an engine that plays a script."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from prorl_hpc.agents.episode import Conversation, Limits
from prorl_hpc.agents.tools import spell_call
from prorl_hpc.inference.engine import Sampling
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.proxy.app import serve_episode
from prorl_hpc.proxy.capture import Capture, carried_roles
from prorl_hpc.proxy.server import SocketServer
from tests.prorl_hpc.agents.templates import byte_tokenizer

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


def call_bash(command: str, *, before: str = "") -> str:
    """An answer of the model that calls the tool."""
    return before + spell_call("bash", {"command": command})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Engine(ScriptedEngine):
    """Answers in turn and remembers the calls; `hold` keeps them waiting until it is set."""

    def __init__(self, tokenizer: Any, answers: Sequence[str], *, held: bool = False) -> None:
        super().__init__(tokenizer, answers)
        self.calls: list[tuple[tuple[int, ...], Sampling]] = []
        self.num_cancelled = 0
        self.started = asyncio.Event()
        self.hold = asyncio.Event()
        if not held:
            self.hold.set()

    async def generate(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> Any:
        self.started.set()
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        self.calls.append((prompt_ids, sampling))
        return await super().generate(prompt_ids, sampling=sampling, affinity=affinity)


@dataclass(kw_only=True)
class Episode:
    """One episode, open for calls."""

    engine: Engine
    conversation: Conversation
    capture: Capture
    server: SocketServer
    socket: Path
    client: httpx.AsyncClient

    async def chat(self, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": list(messages)} | fields
        return await self.client.post(CHAT, json=body)

    async def say(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """The assistant's message."""
        reply = await self.chat(*messages, **fields)
        assert reply.status_code == 200, reply.text
        message: dict[str, Any] = reply.json()["choices"][0]["message"]
        return message

    def text(self, ids: Sequence[int]) -> str:
        return str(self.conversation.tokenizer.decode(list(ids)))


@asynccontextmanager
async def episode(
    directory: Path,
    *answers: str,
    held: bool = False,
    tokenizer: Any = None,
    engine: Any = None,
    bounds: dict[str, int] | None = None,
    **limits: int,
) -> AsyncIterator[Episode]:
    tokenizer = tokenizer or byte_tokenizer()
    engine = engine or Engine(tokenizer, answers, held=held)
    values = {"context_tokens": 20_000, "max_new_tokens": 500, "max_turns": 50} | limits
    conversation = Conversation(
        tokenizer=tokenizer,
        engine=engine,
        sampling=Sampling(temperature=0.8, max_new_tokens=1),
        limits=Limits(**values),
        seed=5,
        rollout_index=2,
    )
    capture = Capture(conversation, roles=carried_roles(tokenizer))
    socket = directory / "model.sock"
    async with serve_episode(capture, socket, **(bounds or {})) as server:
        transport = httpx.AsyncHTTPTransport(uds=str(socket))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://model", timeout=60.0
        ) as client:
            yield Episode(
                engine=engine,
                conversation=conversation,
                capture=capture,
                server=server,
                socket=socket,
                client=client,
            )


async def until(ready: Any, *, what: str, timeout: float = 60.0) -> None:
    """Polls for a condition; the failure names it."""
    async with asyncio.timeout(timeout):
        while not ready():
            await asyncio.sleep(0.01)
