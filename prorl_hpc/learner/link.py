"""The learner's line to the buffer: who is missing, and when to stop waiting. Knows no training.

The client's own patience bounds every request. Here the wait also ends as soon as a stop is wanted,
so that the time before the walltime goes into a checkpoint and not into waiting.
"""

from collections.abc import Callable
from typing import Protocol

from hpc import endpoints
from prorl_hpc.buffer.channel import Locate
from prorl_hpc.buffer.client import LearnerClient, locate_buffer
from prorl_hpc.buffer.keys import load_client_keys
from prorl_hpc.buffer.messages import BufferGone, WireError
from prorl_hpc.learner.shared import Client
from prorl_hpc.recipe import Recipe
from prorl_hpc.run import Run

MAX_PATIENCE_SECONDS = 600.0
"""How long one request may go unanswered: a buffer's restart in the queue, not a lost one."""

FAREWELL_SECONDS = 30.0
"""The same once all steps are done and there is nothing to ask, only to tell."""


class StopWanted(WireError):
    """A stop is wanted while the buffer doesn't answer; nobody waits any longer."""


class Connect(Protocol):
    """Makes the client; nothing is sent yet."""

    def __call__(self, *, patience_seconds: float) -> Client: ...


def patience(recipe: Recipe, *, is_over: bool) -> float:
    """Seconds that one request may go unanswered; `is_over`: all steps are done and decided."""
    if is_over:
        return FAREWELL_SECONDS
    return min(recipe.buffer.peer_seconds, MAX_PATIENCE_SECONDS)


def open_line(
    run: Run, *, attempt: int, patience_seconds: float, stopping: Callable[[], bool]
) -> LearnerClient:
    """A client of the run's buffer that stops waiting when `stopping()` says so."""
    return LearnerClient(
        attentive(run, locate_buffer(run), stopping=stopping),
        keys=load_client_keys(run, role="learner"),
        run=run.name,
        attempt=attempt,
        patience_seconds=patience_seconds,
    )


def attentive(run: Run, locate: Locate, *, stopping: Callable[[], bool]) -> Locate:
    """`locate`, which the channel asks each second without an answer, with an eye on the stop."""

    def look() -> str | None:
        if stopping():
            culprit = endpoints.culprit(run, "buffer")
            raise StopWanted(f"a stop is wanted and the buffer doesn't answer: {culprit}")
        return locate()

    return look


def explain(run: Run, err: BufferGone) -> BufferGone:
    """The error with what the buffer's job last did."""
    return BufferGone(f"{err}; {endpoints.culprit(run, 'buffer')}")
