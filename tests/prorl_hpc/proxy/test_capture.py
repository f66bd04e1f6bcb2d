"""Prefix merging: which calls become one trajectory, and that its tokens are the engine's own."""

import asyncio

import pytest

from tests.prorl_hpc.proxy.helpers import BASH, Engine, call_bash, episode, user

NASTY = ["<|im_end|>", "🙂 naïve\u0301", "\n\n\n", "  spaces  ", "\x00\x1b[1m", "ls"]


def check_branch(e, call):
    """Every prompt of the branch is a prefix of it, and what was sampled follows unchanged."""
    transcript = call.transcript
    position = 0
    for one in call.path:
        prompt, _ = e.engine.calls[e.capture.tree.calls.index(one)]
        assert tuple(transcript.tokens[: len(prompt)]) == prompt
        assert not any(transcript.loss_mask[position : len(prompt)])
        position = len(prompt) + len(one.completion.token_ids)
        assert tuple(transcript.tokens[len(prompt) : position]) == one.completion.token_ids
        assert all(transcript.loss_mask[len(prompt) : position])
    assert position == len(transcript.tokens)
    versions = zip(transcript.versions, transcript.loss_mask, strict=True)
    assert all((version >= 0) == bool(mask) for version, mask in versions)


def test_thirty_turns_of_tools_are_one_trajectory(tmp_path):
    async def work():
        answers = [call_bash(NASTY[i % 6], before=f"step {i}\n") for i in range(30)]
        async with episode(tmp_path, *answers) as e:
            messages = [{"role": "system", "content": "s"}, user("fix it")]
            for i in range(30):
                message = await e.say(*messages, tools=[BASH])
                (call,) = message["tool_calls"]
                result = {"role": "tool", "tool_call_id": call["id"], "content": NASTY[i % 6]}
                messages += [message, result]
            (leaf,) = e.capture.tree.leaves
            assert len(leaf.path) == 30
            check_branch(e, leaf)
            e.capture.conclude()
            assert e.conversation.transcript.tokens == leaf.transcript.tokens
            assert e.conversation.counts == {"calls": 30, "branches": 1, "left_out_tokens": 0}
            assert e.conversation.text == answers[-1]

    asyncio.run(work())


REWRITTEN = [
    lambda m: m | {"content": (m["content"] or "").strip()},
    lambda m: m | {"content": [{"type": "text", "text": m["content"] or ""}]},
    lambda m: m | {"refusal": None, "annotations": [], "function_call": None},
    lambda m: m | {"tool_calls": [c | {"id": "mine"} for c in m["tool_calls"]]},
    lambda m: (
        m
        | {
            "tool_calls": [
                c | {"function": c["function"] | {"arguments": ' {"command" : "ls"} '}}
                for c in m["tool_calls"]
            ]
        }
    ),
]


@pytest.mark.parametrize("rewrite", REWRITTEN)
def test_an_answer_that_a_client_writes_anew_is_the_same_answer(tmp_path, rewrite):
    async def work():
        async with episode(tmp_path, call_bash("ls", before="\nsay \n"), "done") as e:
            first = await e.say(user("a"), tools=[BASH])
            result = {"role": "tool", "tool_call_id": "x", "content": "b"}
            await e.say(user("a"), rewrite(first), result, tools=[BASH])
            (leaf,) = e.capture.tree.leaves
            assert len(leaf.path) == 2
            check_branch(e, leaf)

    asyncio.run(work())


def test_another_history_is_another_branch_and_the_longest_is_kept(tmp_path):
    async def work():
        async with episode(tmp_path, "first", "second answer", "summary", "end") as e:
            one = await e.say(user("a"))
            await e.say(user("a"), one, user("b"))
            # The client rewrites what was said: a conversation of its own.
            await e.say(user("a"), {"role": "assistant", "content": "other"}, user("b"))
            # And goes on from the first answer in another way.
            await e.say(user("a"), one, user("c"))
            leaves = e.capture.tree.leaves
            assert [len(leaf.path) for leaf in leaves] == [2, 1, 2]
            assert leaves[0].path[0] is leaves[2].path[0]
            for leaf in leaves:
                check_branch(e, leaf)
            e.capture.conclude()
            assert e.conversation.transcript.tokens == leaves[0].transcript.tokens
            # "summary" and "end", each with its end of turn: 8 + 4 tokens
            assert e.conversation.counts == {"calls": 4, "branches": 3, "left_out_tokens": 12}

    asyncio.run(work())


def test_other_tools_are_another_conversation(tmp_path):
    async def work():
        async with episode(tmp_path, "x", "y") as e:
            one = await e.say(user("a"), tools=[BASH])
            await e.say(user("a"), one, user("b"))
            assert len(e.capture.tree.leaves) == 2
            check_branch(e, e.capture.tree.leaves[1])

    asyncio.run(work())


def test_an_answer_cut_at_a_stop_text_is_gone_on_from(tmp_path):
    async def work():
        async with episode(tmp_path, "one STOP two", "three") as e:
            one = await e.say(user("a"), stop="STOP")
            await e.say(user("a"), one, user("b"), stop="STOP")
            (leaf,) = e.capture.tree.leaves
            check_branch(e, leaf)
            # The template's end of turn stands where the engine's own was cut off.
            assert "one STOP<|im_end|>\n<|im_start|>user\nb" in e.text(leaf.ids)

    asyncio.run(work())


def test_the_same_question_twice_is_two_branches(tmp_path):
    async def work():
        async with episode(tmp_path, "x", "y", "z") as e:
            await e.say(user("a"))
            again = await e.say(user("a"))
            await e.say(user("a"), again, user("b"))
            assert [len(leaf.path) for leaf in e.capture.tree.leaves] == [1, 2]
            assert e.capture.tree.main is e.capture.tree.leaves[1]

    asyncio.run(work())


def test_a_failing_engine_ends_the_episode_and_is_nobodys_answer(tmp_path):
    class Broken(Engine):
        async def generate(self, prompt_ids, *, sampling, affinity=""):
            raise ZeroDivisionError("a defect")

    async def work():
        from tests.prorl_hpc.agents.templates import byte_tokenizer

        async with episode(tmp_path, engine=Broken(byte_tokenizer(), [])) as e:
            reply = await e.chat(user("a"))
            assert reply.status_code == 503
            assert isinstance(e.capture.failure, ZeroDivisionError)
            assert (await e.chat(user("a"))).status_code == 403

    asyncio.run(work())
