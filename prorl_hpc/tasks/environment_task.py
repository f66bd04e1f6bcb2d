"""What a task adds whose instances are worked on in an environment. Knows no sandbox's making."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from prorl_hpc.environment.base import Environment, EnvironmentSpec
from prorl_hpc.records import Instance, Score
from prorl_hpc.tasks.base import Task

MakeEnvironment = Callable[[EnvironmentSpec], Environment]
"""A new environment that isn't started: use it with `async with`."""


@runtime_checkable
class EnvironmentTask(Task, Protocol):
    """A task with a sandbox per attempt, and a second, fresh one for scoring.

    The pipeline calls, per attempt: `environment_spec`, `setup` (INIT), the agent (RUN), `result`
    in the agent's environment, which is then closed, and `score_in` (EVAL). For an agent that
    needs no environment none is opened before `score_in`, whose `result` then is empty.
    """

    def environment_spec(self, instance: Instance) -> EnvironmentSpec:
        """The agent's environment. Raises ImageError, IsolationError, TaskError.

        Blocking (images are compared with their digests), and called from several threads.
        """
        ...

    async def setup(self, instance: Instance, environment: Environment) -> None:
        """Prepares the started environment. Raises SandboxError or TransferError."""
        ...

    async def result(self, instance: Instance, environment: Environment) -> bytes:
        """What the agent leaves behind (a diff), taken at the end of its work.

        Raises EnvironmentEnded, SandboxError or TransferError.
        """
        ...

    async def score_in(
        self,
        instance: Instance,
        *,
        result: bytes,
        response: str,
        make_environment: MakeEnvironment,
    ) -> Score:
        """Scores in an environment of its own. `response` is the agent's last answer.

        Raises VerifierError or SandboxError when scoring fails through no fault of the agent.
        """
        ...
