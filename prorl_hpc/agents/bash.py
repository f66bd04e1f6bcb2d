"""The agent that works in a shell: one command per answer, its output as observation.

Knows the form of commands and observations; knows neither sandbox nor task. A command stands in a
fenced block marked `bash`; a block that says `submit` and nothing else ends the episode.
"""

import re
from collections.abc import Sequence

from prorl_hpc.agents.episode import Conversation
from prorl_hpc.agents.render import ObservationRenderer
from prorl_hpc.environment.base import CommandResult, Environment, Stop
from prorl_hpc.records import Message

SUBMIT = "submit"

COMMAND_SECONDS = 120.0

INSTRUCTIONS = (
    "You work in a shell. Each of your answers holds exactly one command (or script) in a block "
    "like\n```bash\nls\n```\nand you are then shown its output. Directory and variables persist. "
    f"When you are done, answer with the single command `{SUBMIT}` in such a block."
)

NO_COMMAND = (
    "Your answer holds no ```bash block, so nothing was run. Give one command in such a block, "
    f"or `{SUBMIT}` when you are done."
)

_BLOCK = re.compile(r"```(?:bash|sh|shell)[ \t]*\n(.*?)```", re.DOTALL)


class Bash:
    """A loop of command and output."""

    needs_environment = True

    def __init__(
        self, render: ObservationRenderer, *, command_seconds: float = COMMAND_SECONDS
    ) -> None:
        self._render = render
        self._command_seconds = command_seconds

    async def run(
        self,
        conversation: Conversation,
        *,
        messages: Sequence[Message],
        environment: Environment | None,
    ) -> None:
        """Until `submit`, or a limit of the conversation."""
        assert environment is not None, "the bash agent needs an environment"
        conversation.begin(with_instructions(messages))
        while not conversation.over:
            command = command_in(await conversation.answer())
            if conversation.over or command == SUBMIT:
                return
            if command is None:
                conversation.observe([NO_COMMAND], render=self._render)
                continue
            result = await environment.run(command, self._command_seconds)
            conversation.observe([show(result)], render=self._render)


def with_instructions(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, led by the instructions where they have no system message."""
    if messages and messages[0].role == "system":
        return tuple(messages)
    return (Message(role="system", content=INSTRUCTIONS), *messages)


def command_in(text: str) -> str | None:
    """The first command of an answer, or None."""
    found = _BLOCK.search(text)
    return found.group(1).strip() or None if found else None


def show(result: CommandResult) -> str:
    """A command's result as the model reads it."""
    notes = [f"exit code {result.exit_code}"]
    if result.stopped_for is Stop.timeout or result.timed_out:
        notes.append(f"stopped after {result.duration_seconds:.0f} s")
    elif result.stopped_for is not None:
        notes.append(f"stopped: {result.stopped_for} limit")
    if result.shell_restarted:
        notes.append("the shell ended and was started again")
    output = result.text.rstrip("\n")
    return f"({', '.join(notes)})\n{output}" if output else f"({', '.join(notes)})"
