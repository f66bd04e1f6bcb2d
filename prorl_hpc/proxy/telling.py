"""What of an answer can be told while it is sampled, and stays true whatever comes. Pure.

    decoded so far   half a character | may become a stop text | a tool call | blanks at the ends
    told             no               | not yet                | no          | not yet, with tools

An answer that is told in pieces is the same, put together, as the one that is told whole.
"""

from collections.abc import Iterable, Sequence

from prorl_hpc.agents.render import Tokenizer, decode_answer
from prorl_hpc.agents.tools import CALL_TAG

TOKENS_PER_LOOK = 32
"""An answer is decoded anew when it has grown by this part of itself: no square of its length."""

HALF = "\ufffd"
"""What a character decodes to whose last bytes are still to come."""


class Telling:
    """One answer as it grows."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Iterable[str], tools: bool) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(filter(None, stop))
        self._tools = tools
        self._told = ""
        self._next_look = 1

    def more(self, ids: Sequence[int]) -> str:
        """The piece that can be told now, given all ids of the answer so far; often empty."""
        if len(ids) < self._next_look:
            return ""
        self._next_look = len(ids) + 1 + len(ids) // TOKENS_PER_LOOK
        text = self._sure(decode_answer(self._tokenizer, ids))
        if not text.startswith(self._told):  # decoded otherwise than before: the end will tell
            return ""
        piece = text[len(self._told) :]
        self._told = text
        return piece

    def _sure(self, text: str) -> str:
        text = text.rstrip(HALF)
        found = [place for one in self._stop if (place := text.find(one)) >= 0]
        text = text[: min([_begun(text, self._stop), *found])]
        if self._tools:
            place = text.find(CALL_TAG)
            text = text[: place if place >= 0 else _begun(text, (CALL_TAG,))].strip()
        return text


def _begun(text: str, words: Iterable[str]) -> int:
    """Where the end of `text` begins one of the words; its length if it begins none."""
    longest = max((len(word) for word in words), default=0)
    for place in range(max(0, len(text) - longest + 1), len(text)):
        if any(word.startswith(text[place:]) for word in words):
            return place
    return len(text)
