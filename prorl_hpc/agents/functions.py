"""The agent that calls functions which a session offers, in <tool_call> tags; else it answers once.

The functions are the instance's own: they are declared to the chat template, and their results come
back under the role `tool`. An answer without a readable call ends the episode. Knows no server.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prorl_hpc.agents.episode import Conversation
from prorl_hpc.agents.render import ObservationRenderer, ToolSchema
from prorl_hpc.agents.tools import Call, calls_in, split_answer
from prorl_hpc.environment.base import Environment
from prorl_hpc.records import Message

MAX_OBSERVATION_CHARACTERS = 16_000
MAX_CALLS = 64
"""Of one answer of `work`; more of them aren't made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One answer of the policy and what became of it."""

    text: str
    """The answer without its calls."""
    calls: tuple[Call, ...] = ()
    results: tuple[str, ...] = ()
    """One for each call that was made; the last step's calls may have none."""


class Functions(Protocol):
    """What can be called."""

    @property
    def schemas(self) -> Sequence[ToolSchema]: ...

    async def call(self, call: Call) -> str:
        """The result as the policy sees it. Raises HpcError when the session is lost."""


class FunctionCalls:
    """A loop of calls and results; without functions, one answer."""

    needs_environment = False

    def __init__(self, render: ObservationRenderer | None) -> None:
        """`render` is None for an agent that only answers once."""
        self._render = render

    async def run(
        self,
        conversation: Conversation,
        *,
        messages: Sequence[Message],
        environment: Environment | None,  # noqa: ARG002
    ) -> None:
        """One answer, whatever it is."""
        conversation.begin(messages)
        await conversation.answer()

    async def converse(
        self,
        conversation: Conversation,
        *,
        messages: Sequence[Message],
        functions: Functions,
        steps: list[Step],
    ) -> None:
        """Until an answer calls nothing, or a limit of the conversation.

        `steps` grows with every answer, so that an episode that is cut short leaves them.
        """
        conversation.begin(messages, tools=functions.schemas)
        while not conversation.over:
            before = len(conversation.transcript.tokens)
            text = await conversation.answer()
            if len(conversation.transcript.tokens) == before:
                return  # nothing was sampled: there is no turn to go with a step
            step = read_step(text) if functions.schemas else Step(text=text)
            steps.append(step)
            if not step.calls or conversation.over:
                return
            results: list[str] = []
            for call in step.calls:
                results.append(shortened(await functions.call(call)))
                steps[-1] = dataclasses.replace(step, results=tuple(results))
            assert self._render is not None, "rows with tools are refused for such an agent"
            conversation.observe(results, render=self._render)

    async def work(
        self, conversation: Conversation, *, messages: Sequence[Message], functions: Functions
    ) -> None:
        """Like `converse`, for policies that may mend what they got wrong.

        A call that can't be read has an observation too; what is thought isn't called.
        """
        assert self._render is not None, "tasks refuse an agent that calls nothing"
        conversation.begin(messages, tools=functions.schemas)
        while not conversation.over:
            calls = calls_in(said(await conversation.answer()))
            if not calls or conversation.over:
                return
            results = [
                f"This call can't be read: {call}"
                if isinstance(call, str)
                else shortened(await functions.call(call))
                for call in calls[:MAX_CALLS]
            ]
            if len(calls) > MAX_CALLS:
                results.append(f"Only the first {MAX_CALLS} calls of an answer are made.")
            conversation.observe(results, render=self._render)


def said(answer: str) -> str:
    """What stands behind the last `</think>`; nothing while the policy is still thinking."""
    if "</think>" in answer:
        return answer.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer


def read_step(answer: str) -> Step:
    """An answer's text and its readable calls; one that can't be read stays text."""
    text, calls = split_answer(answer)
    return Step(text=text if calls else answer, calls=tuple(calls))


def shortened(text: str) -> str:
    """A result that is too long, without its middle."""
    if len(text) <= MAX_OBSERVATION_CHARACTERS:
        return text
    half = MAX_OBSERVATION_CHARACTERS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
