"""The agent of puzzles: one prompt, one answer. Knows nothing of what either says."""

from collections.abc import Sequence

from prorl_hpc.agents.episode import Conversation
from prorl_hpc.environment.base import Environment
from prorl_hpc.records import Message


class SingleTurn:
    """Asks once."""

    needs_environment = False

    async def run(
        self,
        conversation: Conversation,
        *,
        messages: Sequence[Message],
        environment: Environment | None,  # noqa: ARG002
    ) -> None:
        """One answer, whatever it is."""
        conversation.begin(messages)
        await conversation.answer()
