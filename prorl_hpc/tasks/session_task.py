"""What a task adds whose attempts are led and scored through a server that others run.

The pipeline calls, per attempt: `session` (INIT: opened there), `lead` (RUN), `score` (EVAL), and
`close` whatever happens. A failure of the server is an HpcError: the attempt is tried again, then
masked, and never has a reward.
"""

from typing import Protocol, runtime_checkable

from prorl_hpc.agents.episode import Agent, Conversation
from prorl_hpc.records import Instance, Score
from prorl_hpc.tasks.base import Task


class Session(Protocol):
    """One attempt at an instance."""

    async def open(self) -> None:
        """Raises VerifierError."""

    async def lead(self, agent: Agent, conversation: Conversation) -> None:
        """Leads the conversation to its end. Raises EngineError, VerifierError."""

    async def score(self, conversation: Conversation) -> Score:
        """Raises VerifierError."""
        ...

    async def close(self) -> None:
        """Frees its connections."""


@runtime_checkable
class SessionTask(Task, Protocol):
    """A task with a session per attempt."""

    def check_instance(self, instance: Instance) -> None:
        """Raises ValueError for an instance that no session can be opened for."""

    def session(self, instance: Instance) -> Session:
        """A session that isn't open yet."""
        ...
