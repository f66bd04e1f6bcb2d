"""The buffer's client for more than one thread. Knows the calls, not what they mean.

Training, the thread that reads the next batch and the one that publishes talk to the buffer over
one socket: one at a time, and nobody holds it for longer than a short wait.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from prorl_hpc.buffer.messages import GroupIds, GroupRef
from prorl_hpc.learner.collect import GroupSource
from prorl_hpc.learner.validate import ValidationSource

TURN_SECONDS = 0.25
"""Longest wait for the buffer in one turn."""


class Client(GroupSource, ValidationSource, Protocol):
    """The buffer as the loop sees it (prorl_hpc.buffer.client.LearnerClient)."""

    def announce(self, version: int, *, consumed: GroupIds, filtered: int, step: int) -> None: ...

    def published(self, version: int) -> None: ...

    def checkpointed(self, step: int, consumed: GroupIds) -> None: ...

    def finish(self, reason: str) -> None: ...


class SharedClient:
    """A client whose calls take turns."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._turns = threading.Condition()
        self._next = 0
        self._serving = 0

    @property
    def phase(self) -> str:
        return self._client.phase

    def status(self) -> Any:
        """How the buffer is doing; None where the client can't say."""
        ask = getattr(self._client, "status", None)
        if ask is None:
            return None
        with self._turn():
            return ask()

    def announce(self, version: int, *, consumed: GroupIds, filtered: int, step: int) -> None:
        with self._turn():
            self._client.announce(version, consumed=consumed, filtered=filtered, step=step)

    def take(self, num_groups: int, *, timeout_seconds: float) -> list[GroupRef]:
        """Groups as they come, in several turns; fewer when time is up or the buffer stops."""
        taken: list[GroupRef] = []

        def ask(seconds: float) -> bool:
            taken.extend(self._client.take(num_groups - len(taken), timeout_seconds=seconds))
            return len(taken) >= num_groups or self.phase != "running"

        self._in_turns(ask, seconds=timeout_seconds)
        return taken

    def published(self, version: int) -> None:
        with self._turn():
            self._client.published(version)

    def filtered(self, total: int) -> None:
        with self._turn():
            self._client.filtered(total)

    def checkpointed(self, step: int, consumed: GroupIds) -> None:
        with self._turn():
            self._client.checkpointed(step, consumed)

    def damaged(self, shard: int, *, group_id: int, reason: str) -> None:
        with self._turn():
            self._client.damaged(shard, group_id=group_id, reason=reason)

    def validate(self, version: int, counts: dict[str, int], num_rollouts: int) -> None:
        with self._turn():
            self._client.validate(version, counts, num_rollouts)

    def validation_results(
        self, version: int, timeout_seconds: float = 0.0
    ) -> list[GroupRef] | None:
        found: list[list[GroupRef]] = []

        def ask(seconds: float) -> bool:
            refs = self._client.validation_results(version, timeout_seconds=seconds)
            if refs is not None:
                found.append(refs)
            return refs is not None

        self._in_turns(ask, seconds=timeout_seconds)
        return found[0] if found else None

    def validation_given_up(self, version: int) -> int:
        with self._turn():
            return self._client.validation_given_up(version)

    def finish(self, reason: str) -> None:
        with self._turn():
            self._client.finish(reason)

    def _in_turns(self, ask: Callable[[float], bool], *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            with self._turn():
                if ask(min(left, TURN_SECONDS)):
                    return
            if time.monotonic() >= deadline:
                return

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """In the order of asking: a plain lock could go to the same thread again and again."""
        with self._turns:
            mine = self._next
            self._next += 1
            self._turns.wait_for(lambda: self._serving == mine)
        try:
            yield
        finally:
            with self._turns:
                self._serving += 1
                self._turns.notify_all()
