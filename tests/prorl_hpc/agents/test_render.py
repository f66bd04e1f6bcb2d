"""Prompts and observations as token ids."""

import pytest

from prorl_hpc.agents import render
from prorl_hpc.agents.characters import build_character_tokenizer
from prorl_hpc.agents.render import (
    TokenizerError,
    decode_answer,
    load_tokenizer,
    observation_renderer,
    render_prompt,
    stop_ids,
)
from prorl_hpc.records import Message
from tests.prorl_hpc.agents.templates import HISTORY_CHANGES, byte_tokenizer


def user(text):
    return (Message(role="user", content=text),)


def test_a_character_prompt_is_its_characters_and_the_separator():
    tokenizer = build_character_tokenizer("12+")
    # ids 0-4 are <pad> <eos> <bos> <unk> <sep>; then "1" 5, "2" 6, "+" 7
    assert render_prompt(tokenizer, user("1+2")) == (5, 7, 6, 4)
    assert stop_ids(tokenizer) == (1,)


def test_a_character_without_a_token_is_named():
    with pytest.raises(TokenizerError, match="'é'"):
        render_prompt(build_character_tokenizer("12"), user("1é2"))


def test_a_saved_tokenizer_keeps_every_character(tmp_path):
    tokenizer = build_character_tokenizer("1 2\n")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    ids = render_prompt(load_tokenizer(tmp_path), user("1 2\n"))
    assert ids == render_prompt(tokenizer, user("1 2\n")) == (5, 6, 7, 8, 4)


def test_a_missing_tokenizer_is_one_line(tmp_path):
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_prompt_equals_the_template_tokenised_at_once():
    tokenizer = byte_tokenizer()
    messages = [{"role": "user", "content": "list\n\nfiles ok"}]
    want = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert list(render_prompt(tokenizer, user("list\n\nfiles ok"))) == want


def test_text_that_spells_a_control_token_stays_text():
    tokenizer = byte_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = render_prompt(tokenizer, user("say <|im_end|>!"))
    assert ids.count(end) == 1  # the template's own
    assert "say <|im_end|>!" in tokenizer.decode(ids)
    suffix = observation_renderer(tokenizer, role="user")((end,), ["<|im_end|>"])
    assert suffix.count(end) == 1


def test_a_text_that_looks_like_a_mark_is_not_replaced():
    tokenizer = byte_tokenizer()
    (end, *_) = stop_ids(tokenizer)
    mark = "\ue0001\ue001"  # what stands for the second text while the template runs
    suffix = observation_renderer(tokenizer, role="user")((end,), [f"a{mark}b", "second"])
    assert f"a{mark}b" in tokenizer.decode(suffix)
    assert tokenizer.decode(suffix).count("second") == 1


def test_observations_continue_the_template_exactly():
    tokenizer = byte_tokenizer()
    render = observation_renderer(tokenizer, role="user")
    conversation = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "ls"},
        {"role": "user", "content": "a\n\nb"},
    ]
    whole = tokenizer.apply_chat_template(
        conversation, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    answer = (*tokenizer.encode("ls"), stop_ids(tokenizer)[0])
    parts = render_prompt(tokenizer, user("go")) + answer + render(answer, ["a\n\nb"])
    assert list(parts) == whole


def test_an_answer_cut_short_gets_its_end_of_turn():
    tokenizer = byte_tokenizer()
    render = observation_renderer(tokenizer, role="user")
    (stop, *_) = stop_ids(tokenizer)
    assert render((1, 2), ["x"])[0] == stop
    assert render((1, 2, stop), ["x"]) == render((1, 2), ["x"])[1:]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (HISTORY_CHANGES, "depends on earlier turns"),
        ("{% for m in messages %}{{ m.content }} {% endfor %}", "control token"),
        ("{% for m in messages %}{% if m.role != 'user' %}{{ m.content }}{% endif %}{% endfor %}",
         "observation isn't shown"),
        (None, "no chat template"),
    ],
)  # fmt: skip
def test_templates_without_a_fixed_suffix_are_refused(template, reason):
    with pytest.raises(TokenizerError, match=reason):
        observation_renderer(byte_tokenizer(template=template), role="user")


def test_decoding_leaves_control_tokens_out():
    tokenizer = byte_tokenizer()
    ids = (*tokenizer.encode("héllo 🙂"), stop_ids(tokenizer)[0])
    assert decode_answer(tokenizer, ids) == "héllo 🙂"


def test_stop_ids_are_found_once_per_tokenizer_and_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = build_character_tokenizer("abc")
    first = stop_ids(tokenizer)
    found = []
    monkeypatch.setattr(render, "_find_stop_ids", lambda t: found.append(t) or (7,))
    assert stop_ids(tokenizer) == first
    tokenizer.chat_template = f"{tokenizer.chat_template} "
    assert stop_ids(tokenizer) == stop_ids(tokenizer) == (7,)
    assert found == [tokenizer]
