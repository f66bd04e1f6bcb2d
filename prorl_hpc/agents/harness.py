"""The agent that is a program of its own: it speaks an LLM API and works in the sandbox by itself.

Knows how such a program is started and ended, and what is kept of its calls; knows no task. The
sandbox needs no network: the API's socket lies in the directory through which files come in.
"""

import asyncio
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from hpc.errors import SandboxError
from prorl_hpc.agents.episode import Conversation
from prorl_hpc.environment.base import CommandResult, Environment, EnvironmentSpec
from prorl_hpc.environment.files import Doors
from prorl_hpc.recipe import HarnessConfig
from prorl_hpc.records import Message

PACKAGE = "/.prorl-harness"
DIRECTORY, SOCKET = "harness", "model.sock"
"""Below the directory of files on their way in, which the sandbox can't write."""

GRACE_SECONDS = 15.0
"""How long a program may go on after its last call was refused, to leave its work in order."""

NO_LIMIT_SECONDS = 30 * 86400.0
"""The episode's own limit comes first."""

VARIABLES = {
    "OPENAI_API_KEY": "unused",
    "OPENAI_BASE_URL": "{url}/v1",
    "OPENAI_API_BASE": "{url}/v1",
    "ANTHROPIC_API_KEY": "unused",
    "ANTHROPIC_BASE_URL": "{url}",
}
"""Where the usual clients look."""


@runtime_checkable
class Reachable(Protocol):
    """An environment with a directory that host and sandbox share."""

    @property
    def transfer(self) -> Doors: ...


class Harness:
    """One program per attempt."""

    needs_environment = True

    def __init__(self, config: HarnessConfig, *, tokenizer: Any) -> None:
        """Raises TokenizerError when this chat template can't carry what follows an answer."""
        from prorl_hpc.proxy.capture import carried_roles

        self._config = config
        self._roles = carried_roles(tokenizer)

    def furnish(self, spec: EnvironmentSpec) -> EnvironmentSpec:
        """The environment with the program's own packages in it, read-only."""
        if self._config.package is None:
            return spec
        package = Path(self._config.package).expanduser().absolute()
        return dataclasses.replace(spec, binds=(*spec.binds, (package, PACKAGE)))

    async def run(
        self,
        conversation: Conversation,
        *,
        messages: Sequence[Message],
        environment: Environment | None,
    ) -> None:
        """Until the program ends, or a limit ends it. Its longest chain of calls is kept."""
        from prorl_hpc.proxy.app import serve_episode
        from prorl_hpc.proxy.capture import Capture

        assert isinstance(environment, Reachable), "a harness needs a sandbox that shares files"
        capture = Capture(conversation, roles=self._roles)
        doors = environment.transfer
        outside, inside = doors.inbox_host / DIRECTORY, f"{doors.inbox}/{DIRECTORY}"
        try:
            await asyncio.to_thread(self._lay_out, outside, inside, messages)
            async with serve_episode(capture, outside / SOCKET):
                argv = ["python3", "-I", "-S", f"{inside}/forwarder.py", f"{inside}/settings.json"]
                result = await _until_over(environment, shlex.join(argv), capture.over)
        finally:
            capture.conclude()
        if capture.failure is not None:
            raise capture.failure
        if result is not None and result.exit_code != 0:
            conversation.note = f"the harness ended with {_last_words(result)}"
        if result is not None and capture.num_asked == 0:
            raise SandboxError(
                f"the harness never asked the model: it ended with {_last_words(result)}"
            )

    def _lay_out(self, outside: Path, inside: str, messages: Sequence[Message]) -> None:
        """Writes what the sandbox's side needs. Raises SandboxError when the node has no room."""
        problem = "\n\n".join(message.content for message in messages)
        settings = {
            "socket": f"{inside}/{SOCKET}",
            "command": self._config.command,
            "package": PACKAGE if self._config.package is not None else "",
            "variables": VARIABLES | self._config.variables,
            "values": {"problem": problem, "problem_file": f"{inside}/problem.txt"},
        }
        source = Path(__file__).parents[1] / "proxy" / "forwarder.py"
        try:
            outside.mkdir(exist_ok=True)
            (outside / "forwarder.py").write_bytes(source.read_bytes())
            (outside / "settings.json").write_bytes(msgspec.json.encode(settings))
            (outside / "problem.txt").write_text(problem)
        except OSError as err:
            raise SandboxError(f"{outside} can't be written: {err.strerror}") from err


async def _until_over(
    environment: Environment, command: str, over: asyncio.Event
) -> CommandResult | None:
    """The command's result; None when it went on for too long after the end of its calls."""
    work = asyncio.ensure_future(environment.run(command, NO_LIMIT_SECONDS))
    end = asyncio.ensure_future(over.wait())
    try:
        await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await asyncio.wait({work}, timeout=GRACE_SECONDS)
        return work.result() if work.done() else None
    finally:
        for task in (work, end):
            task.cancel()
        await asyncio.gather(work, end, return_exceptions=True)


def _last_words(result: CommandResult) -> str:
    lines = [line.strip() for line in result.text.splitlines() if line.strip()]
    stopped = f", stopped for {result.stopped_for}" if result.stopped_for is not None else ""
    said = f": {lines[-1][-300:]}" if lines else ""
    return f"exit code {result.exit_code}{stopped}{said}"
