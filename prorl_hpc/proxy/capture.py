"""Answers the calls of one episode and keeps their tokens. Knows a conversation; no API, no socket.

A prompt is rendered by the model's own chat template, exactly as this project's agents do it. The
limits of the conversation hold: turns, tokens per answer, context. Sampling is the recipe's.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from prorl_hpc.agents.episode import Conversation
from prorl_hpc.agents.render import (
    TokenizerError,
    decode_answer,
    observation_renderer,
    render_after,
    render_prompt,
    spells_control,
)
from prorl_hpc.agents.tools import split_answer
from prorl_hpc.inference.engine import Completion
from prorl_hpc.proxy.chat import Answer, Ask, Refused, ToolCall, digest_tools, digest_turn
from prorl_hpc.proxy.telling import Telling
from prorl_hpc.proxy.tree import Call, CallTree
from prorl_hpc.records import Message

log = logging.getLogger("prorl_hpc.proxy")

MAX_PARALLEL = 16
"""Calls of one episode that are sampled at the same time; others wait."""

COUNTS_PER_TURN = 20
"""Prompts that may be counted, per turn of the limit: a program must not keep a node busy."""

LETTERS_PER_TOKEN = 32
"""A text with more letters than that per token of the context can't fit: it isn't tokenised."""


Tell = Callable[[int, str], None]
"""(number of the call, the next piece of its text), while the answer is sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A call whose prompt fits."""

    ask: Ask
    parent: Call | None
    given: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    digest: bytes
    """Names the conversation without its answer."""


def carried_roles(tokenizer: object) -> frozenset[str]:
    """Roles that may follow an answer under this chat template.

    Raises TokenizerError when users can't; without `tool`, calls with tools are refused.
    """
    observation_renderer(tokenizer, role="user")
    try:
        observation_renderer(tokenizer, role="tool")
    except TokenizerError:
        return frozenset({"user"})
    return frozenset({"user", "tool"})


class Capture:
    """The model's side of one episode."""

    def __init__(self, conversation: Conversation, *, roles: frozenset[str]) -> None:
        self.tree = CallTree()
        self.over = asyncio.Event()
        """Set when no call is answered any more: turns are used up, or the engine failed."""
        self.failure: Exception | None = None
        self.num_asked = 0
        """Calls that were understood, answered or not."""
        self._conversation = conversation
        self._roles = roles
        self._parallel = asyncio.Semaphore(MAX_PARALLEL)
        self._num_counted = 0
        self._num_sampling = 0
        self._closed = False
        """No new calls; those that are being sampled still get their answers."""
        self._last = "stop"

    def prepare(self, ask: Ask) -> Prepared:
        """Renders the prompt. Raises Refused for what can't be answered."""
        self._check_open()
        self._check_ask(ask)
        self.num_asked += 1
        self._check_turns()
        try:
            prepared = self._render(ask)
        except TokenizerError as err:
            raise Refused(400, str(err)) from err
        context = self._conversation.limits.context_tokens
        if len(prepared.prompt_ids) >= context:
            self._refuse_length(len(prepared.prompt_ids))
        return prepared

    def count(self, ask: Ask) -> int:
        """Tokens of the prompt. Raises Refused."""
        self._check_open()
        self._num_counted += 1
        if self._num_counted > COUNTS_PER_TURN * self._conversation.limits.max_turns:
            raise Refused(429, "too many prompts were counted in this episode")
        self._check_ask(ask)
        try:
            return len(self._render(ask).prompt_ids)
        except TokenizerError as err:
            raise Refused(400, str(err)) from err

    async def answer(self, prepared: Prepared, *, tell: Tell | None = None) -> Answer:
        """Samples and keeps the answer; `tell` hears the beginning of its text as it comes.

        Raises Refused; cancelling cancels the engine's request.
        """
        async with self._parallel:
            self._check_open()
            self._check_turns()  # calls that were prepared side by side may have used the last one
            number = self._conversation.turns
            self._num_sampling += 1
            try:
                completion = await self._conversation.sample(
                    prepared.prompt_ids,
                    max_new_tokens=prepared.ask.max_tokens,
                    watch=None if tell is None else self._watch(prepared.ask, number, tell),
                )
                return self._keep(prepared, completion, number=number)
            except Exception as err:  # a defect is no more the agent's fault than a dead engine
                self.failure = self.failure or err
                self.over.set()
                log.warning("call %s: %s", number, err)
                raise Refused(503, "the engine failed; the episode is over") from err
            finally:
                self._num_sampling -= 1
                if self._closed and not self._num_sampling:
                    self.over.set()

    def conclude(self) -> None:
        """Hands the main branch and the counts to the conversation. Once, at the end."""
        conversation, main = self._conversation, self.tree.main
        self.over.set()
        whole = sum(len(call.completion.token_ids) for call in self.tree.calls)
        kept = 0
        if main is not None:
            conversation.transcript = main.transcript
            conversation.text = main.text
            kept = sum(conversation.transcript.loss_mask)
        conversation.end(self._last)
        conversation.counts = {
            "calls": float(len(self.tree.calls)),
            "branches": float(len(self.tree.leaves)),
            "left_out_tokens": float(whole - kept),
        }

    def _watch(self, ask: Ask, number: int, tell: Tell) -> Callable[[Sequence[int]], None]:
        telling = Telling(self._conversation.tokenizer, stop=ask.stop, tools=bool(ask.tools))

        def watch(ids: Sequence[int]) -> None:
            if piece := telling.more(ids):
                tell(number, piece)

        return watch

    # --- parts ---------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed or self.over.is_set():
            raise _over("no more calls are answered")

    def _check_turns(self) -> None:
        most = self._conversation.limits.max_turns
        if self._conversation.turns < most:
            return
        self._closed, self._last = True, "turns"
        if not self._num_sampling:
            self.over.set()
        raise _over(f"max_turns={most} calls were answered")

    def _check_ask(self, ask: Ask) -> None:
        if ask.tools and "tool" not in self._roles:
            raise Refused(400, "this model's chat template can't carry the results of tools")
        tools = msgspec.json.encode(ask.tools).decode() if ask.tools else ""
        if spells_control(self._conversation.tokenizer, tools):
            raise Refused(400, "a tool's description spells a control token of the model")
        context = self._conversation.limits.context_tokens
        letters = len(tools) + sum(len(turn.message.content) for turn in ask.turns)
        if letters > context * LETTERS_PER_TOKEN:
            self._refuse_length(letters // LETTERS_PER_TOKEN)

    def _refuse_length(self, num_tokens: int) -> None:
        # It counts as a turn, so that a client that repeats it for ever comes to an end.
        self.num_asked += 1
        self._conversation.turns += 1
        self._last = "length"
        context = self._conversation.limits.context_tokens
        raise Refused(
            400,
            f"This model's maximum context length is {context} tokens. However, the prompt has at "
            f"least {num_tokens} tokens, which leaves no room for an answer.",
            code="context_length_exceeded",
        )

    def _render(self, ask: Ask) -> Prepared:
        digest = digest_tools(ask.tools)
        parent: Call | None = None
        covered = 0
        messages: list[Message] = []
        for place, turn in enumerate(ask.turns, start=1):
            digest = digest_turn(digest, turn)
            found = self.tree.find(digest) if turn.role == "assistant" else None
            # In a prompt of its own, an answer reads as it was sampled.
            messages.append(
                turn.message if found is None else Message(role="assistant", content=found.text)
            )
            if found is not None:
                parent, covered = found, place
        rest = ask.turns[covered:]
        if parent is not None and rest and {turn.role for turn in rest} <= self._roles:
            given = render_after(
                self._conversation.tokenizer,
                parent.completion.token_ids,
                [turn.message for turn in rest],
                stops=self._conversation.stops,
            )
            ids = (*parent.ids, *given)
        else:
            parent = None
            given = render_prompt(self._conversation.tokenizer, messages, tools=ask.tools)
            ids = given
        return Prepared(ask=ask, parent=parent, given=given, prompt_ids=ids, digest=digest)

    def _keep(self, prepared: Prepared, completion: Completion, *, number: int) -> Answer:
        tokenizer, ask = self._conversation.tokenizer, prepared.ask
        completion, text, stopped_by = cut_at_stop(tokenizer, completion, ask.stop)
        shown, calls = split_answer(text) if ask.tools else (text, [])
        if not self._closed:
            self._last = "length" if completion.finish_reason == "length" else "stop"
        finish = completion.finish_reason
        if stopped_by is not None:
            finish = "stop_sequence"
        elif calls and finish == "stop":
            finish = "tool_calls"
        answer = Answer(
            number=number,
            text=shown,
            calls=tuple(ToolCall(name=call.name, arguments=call.arguments) for call in calls),
            finish=finish,
            prompt_tokens=len(prepared.prompt_ids),
            completion_tokens=len(completion.token_ids),
            stop_sequence=stopped_by,
        )
        call = Call(
            number=number,
            parent=prepared.parent,
            given=prepared.given,
            completion=completion,
            text=text,
        )
        self.tree.add(call, digest=digest_turn(prepared.digest, answer.turn))
        return answer


def cut_at_stop(
    tokenizer: object, completion: Completion, stop: tuple[str, ...]
) -> tuple[Completion, str, str | None]:
    """The completion up to the token that completes a stop text; its text up to the stop text.

    What was sampled after it is forgotten, in the trajectory too: nobody has seen it.
    """
    ids = completion.token_ids
    text = decode_answer(tokenizer, ids)
    found = [(place, one) for one in stop if one and (place := text.find(one)) >= 0]
    if not found:
        return completion, text, None
    place, by = min(found)
    low, high = 1, len(ids)
    while low < high:  # the fewest tokens whose text holds it
        middle = (low + high) // 2
        if by in decode_answer(tokenizer, ids[:middle]):
            high = middle
        else:
            low = middle + 1
    kept = Completion(
        token_ids=ids[:low],
        logprobs=completion.logprobs[:low],
        versions=completion.versions[:low],
        finish_reason="stop",
    )
    return kept, text[:place], by


def _over(why: str) -> Refused:
    # 403: what clients don't try again
    return Refused(403, f"the episode is over: {why}", kind="permission_error", code="episode_over")
