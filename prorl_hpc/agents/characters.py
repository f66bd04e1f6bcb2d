"""A character-level tokenizer for tiny models. Knows no task and no file; transformers is lazy.

One token per character, so nothing merges and every text has exactly one tokenisation. Unknown
characters become `<unk>`; `prorl_hpc.agents.render` refuses prompts that hold them.
"""

from typing import Any

from prorl_hpc.recipe import RecipeError

PAD, EOS, BOS, UNKNOWN, SEPARATOR = SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<sep>")
"""Ids 0 to 4, in this order; the characters follow in the order given."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% else %}<sep>{% endif %}{% endfor %}"
)
"""The text of the user, then the separator; the answer of the assistant ends with `<eos>`."""


def build_character_tokenizer(characters: str) -> Any:
    """A PreTrainedTokenizerFast: one token per distinct character, and five special ones.

    Raises RecipeError when `characters` is empty.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    distinct = list(dict.fromkeys(characters))
    if not distinct:
        raise RecipeError("model.vocabulary is empty; give the characters that prompts may hold")
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *distinct])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[SEPARATOR],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
