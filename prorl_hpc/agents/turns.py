"""The turns of a conversation, read from its tokens. Pure; knows no tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One answer of the policy."""

    prompt_ids: list[int]
    """All that the policy saw before it."""
    answer_ids: list[int]
    logprobs: list[float]


def turns_of(
    tokens: Sequence[int], *, loss_mask: Sequence[int], logprobs: Sequence[float]
) -> list[Turn]:
    """Runs of sampled tokens, in order; between two of them there is always an observation."""
    turns: list[Turn] = []
    start = 0
    while start < len(tokens):
        if not loss_mask[start]:
            start += 1
            continue
        end = start
        while end < len(tokens) and loss_mask[end]:
            end += 1
        turns.append(
            Turn(
                prompt_ids=list(tokens[:start]),
                answer_ids=list(tokens[start:end]),
                logprobs=list(logprobs[start:end]),
            )
        )
        start = end
    return turns
