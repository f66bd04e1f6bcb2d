"""Answers that are told while they are sampled: the pieces, and what a client sees of them."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_hpc.agents.tools import split_answer
from prorl_hpc.inference.engine import Chunk, Completion, Sampling
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.proxy.capture import cut_at_stop
from prorl_hpc.proxy.telling import Telling
from tests.prorl_hpc.agents.templates import byte_tokenizer
from tests.prorl_hpc.proxy.helpers import (
    BASH,
    CHAT,
    MESSAGES,
    call_bash,
    episode,
    until,
    user,
)

TOKENIZER = byte_tokenizer()
PARTS = st.sampled_from(
    ["a", " ", "\n", "é", "😀", "STOP", "STO", "cd", "abcde", "<tool_call>", "<tool",
     "</tool_call>", '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>']
)  # fmt: skip
STOPS = st.lists(st.sampled_from(["STOP", "abcde", "cd", "\n\n", ""]), max_size=3)


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def told_of(ids: Sequence[int], *, stop: Sequence[str], tools: bool) -> list[str]:
    telling = Telling(TOKENIZER, stop=stop, tools=tools)
    return [telling.more(ids[:end]) for end in range(1, len(ids) + 1)]


@given(st.lists(PARTS, max_size=12), STOPS, st.booleans())
def test_what_is_told_early_is_the_beginning_of_the_answer(
    parts: list[str], stop: list[str], tools: bool
) -> None:
    ids = ids_of("".join(parts))
    told = "".join(told_of(ids, stop=stop, tools=tools))
    whole = Completion(
        token_ids=tuple(ids), logprobs=(0.0,) * len(ids), versions=(0,) * len(ids),
        finish_reason="stop",
    )  # fmt: skip
    _, text, _ = cut_at_stop(TOKENIZER, whole, tuple(stop))
    shown = split_answer(text)[0] if tools else text
    assert shown.startswith(told)


def test_plain_text_is_told_at_once_and_long_text_in_growing_pieces() -> None:
    pieces = told_of(ids_of("abc" * 200), stop=(), tools=True)
    assert pieces[:3] == ["a", "b", "c"]
    assert "".join(pieces) == ("abc" * 200)[: len("".join(pieces))]
    assert sum(map(bool, pieces)) < 250


@pytest.mark.parametrize(
    ("text", "stop", "tools", "told"),
    [
        ("well ST", ("STOP",), False, "well "),
        ("well STA", ("STOP",), False, "well STA"),
        ("well STOP more", ("STOP",), False, "well "),
        ("  well <tool_c", (), True, "well"),
        ("well <tool_call>{", (), True, "well"),
        ("well <tool_call>{", (), False, "well <tool_call>{"),
        ("well  ", (), True, "well"),
    ],
)
def test_what_may_still_change_waits(
    text: str, stop: tuple[str, ...], tools: bool, told: str
) -> None:
    assert "".join(told_of(ids_of(text), stop=stop, tools=tools)) == told


def test_half_a_character_waits() -> None:
    ids = ids_of("x😀")
    assert told_of(ids, stop=(), tools=False) == ["x", *[""] * (len(ids) - 2), "😀"]


class Dripping(ScriptedEngine):
    """Streams its answer token by token; stands still before token 6 until `hold` is set."""

    def __init__(self, *answers: str, held: bool = False) -> None:
        super().__init__(TOKENIZER, answers)
        self.num_cancelled = 0
        self.hold = asyncio.Event()
        if not held:
            self.hold.set()

    async def stream(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        done = await self.generate(prompt_ids, sampling=sampling, affinity=affinity)
        for place, token in enumerate(done.token_ids):
            if place == 6:
                try:
                    await self.hold.wait()
                except asyncio.CancelledError:
                    self.num_cancelled += 1
                    raise
            last = place == len(done.token_ids) - 1
            yield Chunk(
                token_ids=(token,),
                logprobs=(done.logprobs[place],),
                versions=(done.versions[place],),
                finish_reason=done.finish_reason if last else None,
            )


def texts(lines: Sequence[str]) -> str:
    """The text in the events of either API."""
    found = ""
    for line in lines:
        if line.startswith("data: {"):
            data: Any = json.loads(line[6:])
            for choice in data.get("choices", ()):
                found += choice["delta"].get("content") or ""
            found += (data.get("delta") or {}).get("text", "")
    return found


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_client_reads_the_text_while_the_model_writes(tmp_path: Path, path: str) -> None:
    async def work() -> None:
        engine = Dripping(call_bash("ls", before="so be it "), held=True)
        tool = {"name": "bash", "input_schema": {"type": "object"}} if path == MESSAGES else BASH
        body = {"model": "m", "max_tokens": 400, "messages": [user("a")], "tools": [tool],
                "stream": True}  # fmt: skip
        async with (
            episode(tmp_path, engine=engine) as e,
            e.client.stream("POST", path, json=body) as reply,
        ):
            lines: list[str] = []

            async def read() -> None:
                async for line in reply.aiter_lines():
                    lines.append(line)

            reading = asyncio.create_task(read())
            await until(lambda: texts(lines) == "so be", what="the first words")
            assert not e.capture.tree.calls
            engine.hold.set()
            await reading
            assert texts(lines) == "so be it"
            assert "".join(lines).count('"bash"') == 1
            (call,) = e.capture.tree.calls
            assert len(call.completion.token_ids) == len(call.completion.logprobs)
            assert call.text == call_bash("ls", before="so be it ")

    asyncio.run(work())


def test_a_client_that_goes_amid_the_text_ends_the_engines_request(tmp_path: Path) -> None:
    async def work() -> None:
        engine = Dripping("so be it", held=True)
        async with episode(tmp_path, engine=engine) as e:
            body = {"model": "m", "messages": [user("a")], "stream": True}
            async with e.client.stream("POST", CHAT, json=body) as reply:
                async for line in reply.aiter_lines():
                    if "so" in line or "s" in texts([line]):
                        break
            await until(lambda: engine.num_cancelled == 1, what="the cancelled request")

    asyncio.run(work())


def test_a_stream_that_breaks_off_amid_the_text_ends_in_an_error(tmp_path: Path) -> None:
    class Broken(Dripping):
        async def stream(
            self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
        ) -> AsyncGenerator[Chunk, None]:
            async for chunk in super().stream(prompt_ids, sampling=sampling, affinity=affinity):
                if chunk.finish_reason is None:
                    yield chunk

    async def work() -> None:
        async with episode(tmp_path, engine=Broken("so be it")) as e:
            reply = await e.chat(user("a"), stream=True)
            assert '"error"' in reply.text
            assert "[DONE]" not in reply.text
            assert not e.capture.tree.calls
            assert e.capture.failure is not None

    asyncio.run(work())
