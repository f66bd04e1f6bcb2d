"""Scripts instead of a model's commands: what runs, and how often the model is asked."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from prorl_hpc.agents.replay import (
    DESTRUCTIVE,
    PATCH_PATH,
    Policy,
    Replay,
    gold_script,
    make_replay,
)
from prorl_hpc.records import Message
from tests.fakes.environments import FakeEnvironment

MESSAGES = (Message(role="user", content="mend it"),)


class Recorder:
    """Stands for a conversation: counts how often the model is asked."""

    def __init__(self, rollout_index: int = 0) -> None:
        self.rollout_index = rollout_index
        self.begun: Sequence[Message] = ()
        self.num_answers = 0
        self.seen: list[str] = []

    def begin(self, messages: Sequence[Message]) -> None:
        self.begun = messages

    async def answer(self) -> str:
        self.num_answers += 1
        return ""

    def observe(self, observations: Sequence[str], *, render: Any) -> None:
        self.seen += observations


class Keeping(FakeEnvironment):
    """Keeps the files that are put."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}

    async def put(self, path: str, data: bytes) -> None:
        self.files[path] = data


def play(agent: Replay, rollout_index: int = 0) -> tuple[Recorder, Keeping]:
    conversation, environment = Recorder(rollout_index), Keeping()
    asyncio.run(agent.run(conversation, messages=MESSAGES, environment=environment))  # type: ignore
    return conversation, environment


def test_gold_applies_the_patch() -> None:
    agent = make_replay(Policy.gold, golds={"mend it": b"patch"}, directory="/tree")
    conversation, environment = play(agent)
    assert environment.files == {PATCH_PATH: b"patch"}
    assert environment.commands == list(gold_script(b"patch", "/tree")[1:])
    assert conversation.num_answers == 1
    assert conversation.begun[-1].content == "mend it"


def test_empty_does_nothing_but_ask_the_model() -> None:
    conversation, environment = play(make_replay(Policy.empty, golds={}, directory="/tree"))
    assert environment.commands == []
    assert conversation.num_answers == 1


def test_mixed_takes_turns_within_a_group_whichever_node_runs_a_rollout() -> None:
    nodes = [
        make_replay(Policy.mixed, golds={"mend it": b"patch"}, directory="/tree") for _ in range(2)
    ]
    acted = [bool(play(nodes[i // 2 % 2], i)[1].commands) for i in range(4)]
    assert acted == [True, False, True, False]
    assert [bool(play(node, 1)[1].commands) for node in nodes] == [False, False]


def test_destructive_goes_through_all_attacks() -> None:
    agent = make_replay(Policy.destructive, golds={}, directory="/tree")
    attacks = [play(agent)[1].commands[-1] for _ in DESTRUCTIVE]
    assert attacks == list(DESTRUCTIVE.values())


@pytest.mark.parametrize("shown", [True, False])
def test_the_model_may_be_shown_what_commands_say(shown: bool) -> None:
    agent = Replay(lambda *_: ["ls", "pwd"], render=(lambda *_: ()) if shown else None)
    conversation, environment = play(agent)
    assert environment.commands == ["ls", "pwd"]
    assert conversation.num_answers == (3 if shown else 1)
    assert len(conversation.seen) == (2 if shown else 0)
