"""Examples of good answers, as token ids. Knows tasks and tokenizers; no model."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from prorl_hpc.agents.render import render_prompt, stop_ids
from prorl_hpc.learner.model import ModelError
from prorl_hpc.records import Instance, Kind

MAX_MISSES = 1000

Example = tuple[NDArray[np.int64], int]
"""Token ids of a prompt with its answer, and where the answer begins."""


class DemonstratingTask(Protocol):
    """A task that can show what a good answer looks like."""

    def size(self, kind: Kind) -> int: ...

    def instance(self, index: int, *, kind: Kind) -> Instance: ...

    def demonstration(self, instance: Instance) -> str | None: ...


class Demonstrations(Iterator[Example]):
    """Endless examples of the training split, the tasks mixed by weight; equal seeds, equal ones.

    `next` raises ModelError when no task gives a demonstration that fits.
    """

    def __init__(
        self,
        tasks: Mapping[str, DemonstratingTask],
        weights: Mapping[str, float],
        tokenizer: Any,
        *,
        seed: int,
        longest: int,
    ) -> None:
        """`longest`: tokens of prompt and answer together."""
        self._tasks = tasks
        self._tokenizer = tokenizer
        self._longest = longest
        self._rng = np.random.default_rng([seed, 0x5F7])
        self._names = sorted(name for name in tasks if weights[name] > 0)
        share = np.array([weights[name] for name in self._names])
        self._share = share / share.sum()
        self._end = stop_ids(tokenizer)[0]

    @property
    def place(self) -> str:
        """Where the sequence stands, for `go_on_from`."""
        return json.dumps(self._rng.bit_generator.state)

    def go_on_from(self, place: str) -> None:
        """The next example is the one that was next at `place`."""
        self._rng.bit_generator.state = json.loads(place)

    def __next__(self) -> Example:
        for _ in range(MAX_MISSES):
            example = self._draw()
            if example is not None:
                return example
        raise ModelError(
            f"warmup.steps: none of {MAX_MISSES} instances of {', '.join(self._names)} has a "
            f"demonstration of at most warmup.max_tokens={self._longest}; set warmup.steps=0 or "
            "raise it"
        )

    def _draw(self) -> Example | None:
        task = self._tasks[self._names[int(self._rng.choice(len(self._names), p=self._share))]]
        index = int(self._rng.integers(task.size(Kind.train)))
        instance = task.instance(index, kind=Kind.train)
        answer = task.demonstration(instance)
        if answer is None:
            return None
        prompt = render_prompt(self._tokenizer, instance.messages)
        ids = [*prompt, *self._tokenizer.encode(answer, add_special_tokens=False), self._end]
        return (np.array(ids, dtype=np.int64), len(prompt)) if len(ids) <= self._longest else None
