"""Pieces of a text between two marks, found in time that grows with its length alone.

A lazy pattern (`<a>(.*?)</a>`) reads to the end of the text again for every mark that is never
closed, and a model that repeats itself writes thousands of them.
"""

from collections.abc import Iterator


def enclosed(text: str, *, opening: str, closing: str) -> Iterator[tuple[int, int]]:
    """(start, end) of what stands between an opening mark and the next closing one, in order."""
    end = 0
    while (begin := text.find(opening, end)) >= 0:
        start = begin + len(opening)
        stop = text.find(closing, start)
        if stop < 0:
            return
        yield start, stop
        end = stop + len(closing)
