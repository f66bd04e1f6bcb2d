"""Messages to token ids, through a tokenizer's own chat template. Knows no engine and no task.

A conversation is a growing list of ids: the prompt once, then in turn what the engine returned
(unchanged) and the *suffix* that the template adds after an answer (end of turn, observation, start
of the next answer). Nothing that was sampled is ever tokenised again. Text of the user's or of an
environment never becomes a control token: where it spells one, it is tokenised as plain letters.
transformers is imported lazily.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from hpc.errors import UserError
from prorl_hpc.records import Message

Tokenizer = Any
"""A transformers fast tokenizer (untyped here: importing its class costs seconds)."""

ToolSchema = dict[str, Any]
"""One tool as a JSON schema of a function, in the form that chat templates take."""

_stops: WeakKeyDictionary[Tokenizer, tuple[tuple[str, int | None], tuple[int, ...]]] = (
    WeakKeyDictionary()
)

_MARK = "\ue000{}\ue001"
"""Stands for a message's text while the template runs; private-use characters."""

_MARKS = re.compile("\ue000([0-9]+)\ue001")


class TokenizerError(UserError, ValueError):
    """A tokenizer or chat template that can't be used, or a prompt that it can't express."""


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a Hugging Face directory, exactly as its `tokenizer.json` says.

    AutoTokenizer is only the fallback: for some model types it swaps the pre-tokenizer for the
    type's usual one, and tokens vanish. Raises TokenizerError.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if (Path(path) / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(str(path))
        return AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError, KeyError, ImportError) as err:
        reason = str(err).strip().splitlines()[0] if str(err).strip() else repr(err)
        raise TokenizerError(
            f"tokenizer of model.path={str(path)!r} can't be read: {reason}"
        ) from err


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()
) -> tuple[int, ...]:
    """Ids of a prompt up to where the first answer starts.

    Raises TokenizerError when there is no chat template or a character has no token.
    """
    plain = [{"role": m.role, "content": m.content} for m in messages]
    contents = [m.content for m in messages]
    if any(spells_control(tokenizer, text) for text in contents):
        marked = [m | {"content": _MARK.format(i)} for i, m in enumerate(plain)]
        ids = _encode_parts(tokenizer, _render(tokenizer, marked, tools=tools), contents)
    else:
        ids = _encode(tokenizer, _render(tokenizer, plain, tools=tools))
    _refuse_unknown(tokenizer, ids, contents)
    return ids


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end an answer: the template's end of turn first, then the tokenizer's own `eos`.

    Found once per tokenizer and template: every conversation asks.
    """
    key = (str(tokenizer.chat_template), tokenizer.eos_token_id)
    known = _stops.get(tokenizer)
    if known is None or known[0] != key:
        known = _stops[tokenizer] = (key, _find_stop_ids(tokenizer))
    return known[1]


def _find_stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    found: list[int] = []
    suffix = _encode(tokenizer, _after_answer(tokenizer, (), generate=False))
    if suffix and suffix[0] in _control_ids(tokenizer):
        found.append(suffix[0])
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in found:
        found.append(int(tokenizer.eos_token_id))
    if not found:
        raise TokenizerError(
            "the tokenizer has neither an end-of-turn token nor eos_token; set eos_token"
        )
    return tuple(found)


def decode_answer(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of sampled ids, without control tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class ObservationRenderer:
    """Renders what follows an answer. Made by `observation_renderer`, which checks the template."""

    tokenizer: Tokenizer
    role: str
    stops: tuple[int, ...]

    def __call__(self, answer_ids: Sequence[int], observations: Sequence[str]) -> tuple[int, ...]:
        """Ids between a sampled answer and the start of the next one.

        The end of turn that the engine sampled itself isn't repeated.
        """
        messages = [Message(role=self.role, content=text) for text in observations]
        return render_after(self.tokenizer, answer_ids, messages, stops=self.stops)


def render_after(
    tokenizer: Tokenizer,
    answer_ids: Sequence[int],
    messages: Sequence[Message],
    *,
    stops: Sequence[int],
) -> tuple[int, ...]:
    """Ids between a sampled answer and the next one; `observation_renderer` has checked each role.

    The end of turn that the engine sampled itself isn't repeated.
    """
    marked = [{"role": m.role, "content": _MARK.format(i)} for i, m in enumerate(messages)]
    text = _after_answer(tokenizer, marked, generate=True)
    ids = _encode_parts(tokenizer, text, [m.content for m in messages])
    if answer_ids and answer_ids[-1] in stops and ids and ids[0] in stops:
        return ids[1:]
    return ids


def observation_renderer(
    tokenizer: Tokenizer, *, role: str, tools: Sequence[ToolSchema] = ()
) -> ObservationRenderer:
    """A renderer for observations of `role` (`user` or `tool`).

    Raises TokenizerError when this template has no fixed suffix: when what follows an answer
    depends on what came before it, doesn't begin with a control token, or drops the observation.
    """
    observation = {"role": role, "content": _MARK.format(0)}
    suffix = _after_answer(tokenizer, (observation,), generate=True)
    longer = _after_answer(tokenizer, (observation,), generate=True, num_earlier_turns=2)
    described = _after_answer(tokenizer, (observation,), generate=True, tools=tools)
    where = f"chat template with {role!r} observations"
    if not suffix == longer == described:
        raise TokenizerError(
            f"{where}: the text after an answer depends on earlier turns, so that a conversation "
            "can't grow token by token; use agent=single_turn or another template"
        )
    if suffix.count(_MARK.format(0)) != 1:
        raise TokenizerError(f"{where}: the observation isn't shown once; use another template")
    ids = _encode_parts(tokenizer, suffix, ["x"])
    if not ids or ids[0] not in _control_ids(tokenizer):
        raise TokenizerError(
            f"{where}: an answer isn't followed by a control token, so that its last token may "
            "merge with what follows; use another template"
        )
    return ObservationRenderer(tokenizer=tokenizer, role=role, stops=stop_ids(tokenizer))


def _after_answer(
    tokenizer: Tokenizer,
    observations: Sequence[dict[str, str]],
    *,
    generate: bool,
    num_earlier_turns: int = 0,
    tools: Sequence[ToolSchema] = (),
) -> str:
    """What the template writes after the text of the last answer."""
    role = observations[0]["role"] if observations else "user"
    answer = _MARK.format("answer")
    messages: list[dict[str, str]] = [{"role": "user", "content": "question"}]
    for number in range(num_earlier_turns):
        messages.append({"role": "assistant", "content": f"step {number}"})
        messages.append({"role": role, "content": f"seen {number}"})
    messages += [{"role": "assistant", "content": answer}, *observations]
    text = _render(tokenizer, messages, tools=tools, generate=generate)
    if text.count(answer) != 1:
        raise TokenizerError(
            "the chat template doesn't show an assistant's text exactly once; use another template"
        )
    return text.partition(answer)[2]


def _render(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, str]],
    *,
    tools: Sequence[ToolSchema] = (),
    generate: bool = True,
) -> str:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise TokenizerError(
            "the tokenizer has no chat template; use an instruction-tuned model, or set "
            "chat_template in its tokenizer_config.json"
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generate,
            )
        )
    except TemplateError as err:
        roles = ", ".join(m["role"] for m in messages)
        raise TokenizerError(f"chat template refuses messages with roles {roles}: {err}") from err


def _encode(tokenizer: Tokenizer, text: str, *, plain: bool = False) -> tuple[int, ...]:
    """Ids of `text`; with `plain`, spelled control tokens are letters like any other."""
    backend = tokenizer.backend_tokenizer
    before = backend.encode_special_tokens
    backend.encode_special_tokens = plain
    try:
        return tuple(backend.encode(text, add_special_tokens=False).ids)
    finally:
        backend.encode_special_tokens = before


def _encode_parts(tokenizer: Tokenizer, text: str, contents: Sequence[str]) -> tuple[int, ...]:
    """Encodes a rendered template whose marks stand for `contents`.

    Where no content spells a control token the text is encoded in one piece, as usual.
    """
    if not any(spells_control(tokenizer, content) for content in contents):
        # In one pass: what is put in isn't looked at again, whatever it spells.
        return _encode(tokenizer, _MARKS.sub(lambda found: contents[int(found[1])], text))
    ids: list[int] = []
    for index, content in enumerate(contents):
        before, mark, text = text.partition(_MARK.format(index))
        if not mark:
            raise TokenizerError("the chat template drops or reorders messages; use another one")
        ids += _encode(tokenizer, before)
        ids += _encode(tokenizer, content, plain=True)
    return tuple(ids) + _encode(tokenizer, text)


def _control_ids(tokenizer: Tokenizer) -> frozenset[int]:
    declared = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(declared | set(tokenizer.all_special_ids))


def spells_control(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text holds the spelling of a control token."""
    return any(
        token.special and token.content in text for token in tokenizer.added_tokens_decoder.values()
    )


def _refuse_unknown(tokenizer: Tokenizer, ids: Sequence[int], contents: Sequence[str]) -> None:
    """Character tokenizers have no fallback: an unknown character is a mistake in the recipe."""
    unknown = tokenizer.unk_token_id
    if (
        unknown is None
        or unknown not in ids
        or type(tokenizer.backend_tokenizer.model).__name__ != "WordLevel"
    ):
        return
    vocabulary = tokenizer.get_vocab()
    missing = sorted({c for text in contents for c in text if c not in vocabulary})
    raise TokenizerError(
        f"a prompt holds characters that have no token: {''.join(missing)!r}; "
        "add them to model.vocabulary"
    )
