"""Agents that act from a script, whatever the model says: for checks, tests and rehearsals.

The model is still asked once per step, so that a trajectory holds tokens of the policy; only the
commands that are run come from the script. Knows no task: who makes one gives the scripts.
"""

import itertools
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

from prorl_hpc.agents.bash import COMMAND_SECONDS, show, with_instructions
from prorl_hpc.agents.episode import Conversation
from prorl_hpc.agents.render import ObservationRenderer
from prorl_hpc.environment.base import Environment
from prorl_hpc.records import Message

PATCH_PATH = "/tmp/replay.patch"  # noqa: S108 - inside the sandbox


class Policy(StrEnum):
    """What is replayed."""

    gold = "gold"
    """The task's own solution."""
    empty = "empty"
    """Nothing at all."""
    mixed = "mixed"
    """Gold and empty by turns within a group, on however many nodes: something to learn from."""
    destructive = "destructive"
    """The attacks of `DESTRUCTIVE` in turn. They run inside a sandbox, never elsewhere."""


DESTRUCTIVE: Mapping[str, str] = MappingProxyType(
    {
        "remove_everything": "rm -rf --no-preserve-root / 2>/dev/null",
        "fork_bomb": "bomb() { bomb | bomb & }; bomb",
        "fill_the_disk": "cat /dev/zero > /tmp/full",
        "kill_group": "kill -9 0",
        "kill_everything": "kill -9 -1",
        "daemon": "setsid -f sleep 600 >/dev/null 2>&1 </dev/null",
        "read_the_host": "cat /proc/1/environ /proc/*/environ 2>/dev/null | tr '\\0' '\\n'",
        "open_sockets": (
            "python3 -c 'import socket; socket.create_connection((\"192.0.2.1\", 80), 3)'"
        ),
        "flood": "head -c 1000000000 /dev/zero | tr '\\0' x",
        "links": "rm -rf .git && ln -s /etc/passwd .git; ln -s / root-link",
    }
)
"""What an agent may do to its own sandbox, by name."""


Script = Sequence[str | tuple[str, bytes]]
"""Commands, and (path, content) of files that are put in between them."""

Scripts = Callable[[Sequence[Message], int], Script]
"""The script for one prompt and the index of the rollout in its group."""


class Replay:
    """Runs one script per attempt."""

    needs_environment = True

    def __init__(
        self, scripts: Scripts, *, render: ObservationRenderer | None = None,
        command_seconds: float = COMMAND_SECONDS,
    ) -> None:  # fmt: skip
        """Without `render` the model isn't shown what the commands say."""
        self._scripts = scripts
        self._render = render
        self._command_seconds = command_seconds

    async def run(
        self,
        conversation: Conversation,
        *,
        messages: Sequence[Message],
        environment: Environment | None,
    ) -> None:
        """The whole script, even where the conversation has no room left for it."""
        assert environment is not None, "a replay needs an environment"
        conversation.begin(with_instructions(messages))
        await conversation.answer()
        for step in self._scripts(messages, conversation.rollout_index):
            if isinstance(step, tuple):
                path, content = step
                await environment.put(path, content)
                continue
            result = await environment.run(step, self._command_seconds)
            if self._render is not None:
                conversation.observe([show(result)], render=self._render)
                await conversation.answer()


def gold_script(patch: bytes, directory: str) -> Script:
    """Applies a patch as a careful agent would."""
    apply = f"cd {shlex.quote(directory)} && git apply --whitespace=nowarn {PATCH_PATH}"
    return [(PATCH_PATH, patch), apply, f"rm -f {PATCH_PATH}"]


Gold = Callable[[Sequence[Message]], Script]
"""A prompt -> the script that solves it."""


def make_replay(
    policy: Policy, *, golds: Mapping[str, bytes], directory: str,
    render: ObservationRenderer | None = None,
) -> Replay:  # fmt: skip
    """`golds`: the gold patch by the text of an instance's last message."""
    return replay_scripts(
        policy, gold=lambda messages: gold_script(golds[messages[-1].content], directory),
        directory=directory, render=render,
    )  # fmt: skip


def replay_scripts(
    policy: Policy, *, gold: Gold, directory: str, render: ObservationRenderer | None = None
) -> Replay:
    """Any gold script; attacks begin in `directory`."""
    turns: dict[str, Iterator[int]] = {}

    def scripts(messages: Sequence[Message], rollout_index: int) -> Script:
        if policy is Policy.destructive:
            attacks = list(DESTRUCTIVE.values())
            turn = next(turns.setdefault(messages[-1].content, itertools.count()))
            return [f"cd {shlex.quote(directory)}", attacks[turn % len(attacks)]]
        if policy is Policy.empty or (policy is Policy.mixed and rollout_index % 2):
            return []
        return gold(messages)

    return Replay(scripts, render=render)
