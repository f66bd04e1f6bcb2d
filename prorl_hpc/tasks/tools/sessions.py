"""One attempt at a problem of functions: in a simulated world, or at a list of expected calls.

    world:   answer ─► calls ─► results and complaints ─► ... ─► answer without a call ─► score
    listed:  answer ─► its calls, compared

Each attempt has a world of its own; nothing runs but this code. Whatever a policy writes is data.
"""

from collections.abc import Mapping, Sequence

from prorl_hpc.agents.episode import Agent, Conversation
from prorl_hpc.agents.functions import FunctionCalls, said
from prorl_hpc.agents.render import ToolSchema
from prorl_hpc.agents.replay import Policy
from prorl_hpc.agents.tools import Call, calls_in
from prorl_hpc.records import Message, Outcome, Score
from prorl_hpc.tasks.answers import tagged
from prorl_hpc.tasks.tools.made import Made
from prorl_hpc.tasks.tools.match import num_right
from prorl_hpc.tasks.tools.rows import Listed, spelled
from prorl_hpc.tasks.tools.worlds import SETTINGS


class WorldSession:
    """See prorl_hpc.tasks.session_task.Session."""

    def __init__(
        self, made: Made, *, messages: Sequence[Message], all_or_nothing: bool,
        replay: Policy | None = None,
    ) -> None:  # fmt: skip
        self._made = made
        self._messages = messages
        self._all_or_nothing = all_or_nothing
        self._replay = replay
        self._world = SETTINGS[made.world].world(made.state)
        self._before = self._world.view()
        self._text: str | None = None
        """The answer in words, where it isn't the conversation's own."""
        self.num_calls = 0
        self.num_mistakes = 0

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        return list(self._world.schemas.values())

    async def open(self) -> None:
        """Nothing: the world is there."""

    async def close(self) -> None:
        """Nothing: the world is garbage."""

    async def lead(self, agent: Agent, conversation: Conversation) -> None:
        assert isinstance(agent, FunctionCalls), "the registry of agents makes this task's agent"
        if self._replay is None:
            await agent.work(conversation, messages=self._messages, functions=self)
            return
        conversation.begin(self._messages, tools=self.schemas)
        await conversation.answer()
        self._text = ""
        if acts(self._replay, conversation.rollout_index):
            for name, arguments in self._made.calls:
                await self.call(Call(name=name, arguments=arguments))
            self._text = f"<answer>{self._made.answer}</answer>"

    async def call(self, call: Call) -> str:
        """What the world says; complaints are for the policy to act on."""
        self.num_calls += 1
        result = self._world.call(call.name, call.arguments)
        self.num_mistakes += result.startswith('{"error"')
        return result

    async def score(self, conversation: Conversation) -> Score:
        text = said(conversation.text) if self._text is None else self._text
        # an answer that still calls something isn't the last word
        right = self._made.answer is None or is_answer(
            "" if "<tool_call>" in text else text, self._made.answer
        )
        share = agreement(self._before, self._made.expected, self._world.view())
        counts = {"calls": float(self.num_calls), "mistakes": float(self.num_mistakes)}
        return graded(
            share, right=right, asked=self._made.answer is not None, changed=self._changes,
            all_or_nothing=self._all_or_nothing, counts=counts,
        )  # fmt: skip

    @property
    def _changes(self) -> bool:
        return self._made.expected != self._before


class ListedSession:
    """One answer, compared with the calls that the data set expects."""

    def __init__(
        self, listed: Listed, *, messages: Sequence[Message], all_or_nothing: bool, loose: bool,
        replay: Policy | None = None,
    ) -> None:  # fmt: skip
        self._listed = listed
        self._messages = messages
        self._all_or_nothing = all_or_nothing
        self._loose = loose
        self._replay = replay
        self._text: str | None = None

    async def open(self) -> None:
        """Nothing is opened."""

    async def close(self) -> None:
        """Nothing was opened."""

    async def lead(self, agent: Agent, conversation: Conversation) -> None:  # noqa: ARG002
        conversation.begin(self._messages, tools=self._listed.tools)
        await conversation.answer()
        if self._replay is not None:
            act = acts(self._replay, conversation.rollout_index)
            self._text = spelled(self._listed.calls) if act else ""

    async def score(self, conversation: Conversation) -> Score:
        text = said(conversation.text) if self._text is None else self._text
        if not text.strip():
            return Score(reward=0.0, components={"fraction": 0.0}, outcome=Outcome.invalid)
        found, expected = calls_in(text), self._listed.calls
        readable = [call for call in found if isinstance(call, Call)]
        unread = len(found) - len(readable)
        right = num_right(readable, expected, ordered=self._listed.ordered, loose=self._loose)
        most = max(len(expected), len(found))
        fraction = right / most if most else 1.0
        done = float(fraction == 1.0)
        return Score(
            reward=done if self._all_or_nothing else fraction,
            components={"fraction": fraction, "done": done, "unreadable": float(unread)},
        )


def acts(policy: Policy, rollout_index: int) -> bool:
    """Whether a replay of this rollout does what is right, or nothing."""
    return policy is Policy.gold or (policy is Policy.mixed and rollout_index % 2 == 0)


def agreement(
    before: Mapping[str, str], expected: Mapping[str, str], found: Mapping[str, str]
) -> float:
    """1 where the world is as expected; else the share of right changes among all changes.

    A change is a path whose value isn't the one from before: expected ones that are missing and
    others that were made count alike (Jaccard's index of both sets).
    """
    wanted = _changes(before, expected)
    made = _changes(before, found)
    union = wanted | made
    return len(wanted & made) / len(union) if union else 1.0


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> set[tuple[str, str | None]]:
    paths = before.keys() | after.keys()
    return {(p, after.get(p)) for p in paths if before.get(p) != after.get(p)}


def graded(
    share: float, *, right: bool, asked: bool, changed: bool, all_or_nothing: bool,
    counts: Mapping[str, float],
) -> Score:  # fmt: skip
    """State and answer together. Where nothing is to be changed, a change costs everything."""
    done = float(share == 1.0 and right)
    parts = ([share] if changed else []) + ([float(right)] if asked else [])
    fraction = sum(parts) / len(parts) if changed or share == 1.0 else 0.0
    components = {"state": share, "fraction": fraction, "done": done, **counts}
    if asked:
        components["answer"] = float(right)
    return Score(reward=done if all_or_nothing else fraction, components=components)


def is_answer(text: str, wanted: str) -> bool:
    """Whether the tagged answer (else the whole text) says the wanted number or name."""
    marked = tagged(text)
    found = (text if marked is None else marked).strip().strip(".'\"").strip()
    if wanted.isdigit():
        return found.replace(",", "").replace(" ", "") == wanted
    return " ".join(found.split()).casefold() == wanted.casefold()
