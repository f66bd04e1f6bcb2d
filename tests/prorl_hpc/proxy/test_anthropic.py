"""The Anthropic messages API over a real Unix socket: answers, tools, streams, errors."""

import asyncio
import json

import pytest

from tests.prorl_hpc.proxy.helpers import MESSAGES, call_bash, episode, user

TOOL = {
    "name": "bash",
    "description": "Runs a command",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}


def request(*messages, **fields):
    body = {"model": "m", "max_tokens": 300, "messages": list(messages), "tools": [TOOL]}
    return body | fields


def test_calls_and_results_are_one_trajectory(tmp_path):
    async def work():
        async with episode(tmp_path, call_bash("ls", before="I look."), "done") as e:
            first = user([{"type": "text", "text": "look"}])
            system = [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}]
            reply = await e.client.post(MESSAGES, json=request(first, system=system))
            answer = reply.json()
            assert (answer["type"], answer["role"]) == ("message", "assistant")
            assert answer["stop_reason"] == "tool_use"
            text, use = answer["content"]
            assert text == {"type": "text", "text": "I look."}
            assert (use["type"], use["name"], use["input"]) == (
                "tool_use", "bash", {"command": "ls"}
            )  # fmt: skip
            result = {"type": "tool_result", "tool_use_id": use["id"],
                      "content": [{"type": "text", "text": "a b"}]}  # fmt: skip
            messages = [first, {"role": "assistant", "content": answer["content"]}, user([result])]
            reply = await e.client.post(MESSAGES, json=request(*messages, system=system))
            answer = reply.json()
            assert answer["content"] == [{"type": "text", "text": "done"}]
            assert answer["stop_reason"] == "end_turn"
            (leaf,) = e.capture.tree.leaves
            assert len(leaf.path) == 2
            told = e.text(leaf.ids)
            assert "You help." in told
            assert "<tool_response>\na b\n</tool_response>" in told
            assert answer["usage"]["input_tokens"] == len(e.engine.calls[1][0])

    asyncio.run(work())


def test_a_stream_says_the_same(tmp_path):
    async def work():
        async with episode(tmp_path, call_bash("ls", before="so")) as e:
            reply = await e.client.post(MESSAGES, json=request(user("a"), stream=True))
            events = []
            for block in reply.text.strip().split("\n\n"):
                name, data = block.split("\n")
                events.append(json.loads(data.removeprefix("data: ")))
                assert name == f"event: {events[-1]['type']}"
            assert [event["type"] for event in events] == [
                "message_start",
                *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
                "message_delta",
                "message_stop",
            ]
            deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
            assert deltas[0] == {"type": "text_delta", "text": "so"}
            assert json.loads(deltas[1]["partial_json"]) == {"command": "ls"}
            assert events[-2]["delta"]["stop_reason"] == "tool_use"

    asyncio.run(work())


def test_lengths_and_stop_sequences(tmp_path):
    async def work():
        async with episode(tmp_path, "one STOP", "a long answer") as e:
            reply = await e.client.post(MESSAGES, json=request(user("a"), stop_sequences=["STOP"]))
            assert reply.json()["stop_reason"] == "stop_sequence"
            assert reply.json()["stop_sequence"] == "STOP"
            reply = await e.client.post(MESSAGES, json=request(user("b"), max_tokens=3))
            assert reply.json()["stop_reason"] == "max_tokens"
            assert reply.json()["usage"]["output_tokens"] == 3

    asyncio.run(work())


def test_tokens_are_counted_without_a_call(tmp_path):
    async def work():
        async with episode(tmp_path, "x") as e:
            reply = await e.client.post(f"{MESSAGES}/count_tokens", json=request(user("a")))
            counted = reply.json()["input_tokens"]
            await e.client.post(f"{MESSAGES}?beta=true", json=request(user("a")))
            assert counted == len(e.engine.calls[0][0])
            assert e.conversation.turns == 1

    asyncio.run(work())


def test_counting_has_an_end(tmp_path):
    async def work():
        async with episode(tmp_path, "x", max_turns=1) as e:
            where = f"{MESSAGES}/count_tokens"
            codes = [(await e.client.post(where, json=request(user("a")))).status_code
                     for _ in range(21)]  # fmt: skip
            assert codes == [200] * 20 + [429]
            assert (await e.client.post(MESSAGES, json=request(user("a")))).status_code == 200

    asyncio.run(work())


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "any"}},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [user([{"type": "image", "source": {}}])]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"messages": []},
        {"max_tokens": -1},
    ],
)
def test_errors_have_the_apis_own_shape(tmp_path, fields):
    async def work():
        async with episode(tmp_path) as e:
            reply = await e.client.post(MESSAGES, json=request(user("a")) | fields)
            assert reply.status_code == 400
            assert reply.json()["type"] == "error"
            assert reply.json()["error"]["type"] == "invalid_request_error"
            assert e.engine.calls == []

    asyncio.run(work())
