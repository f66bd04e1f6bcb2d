"""An environment that answers from a script, and a task that needs one."""

from typing import Any, Self

from hpc.errors import SandboxError
from hpc.isolation import Isolation
from prorl_hpc.environment.base import (
    Backend,
    CommandResult,
    EndReason,
    EnvironmentEnded,
    EnvironmentSpec,
)
from prorl_hpc.records import Instance, Kind, Message, Score

ISOLATION = Isolation(
    backend="process",
    runtime_version="0",
    user_namespace=False,
    pid_namespace=False,
    network_none=False,
    own_root=False,
    writable_layer="host",
    memory_limit="none",
    process_limit="none",
    overridden=("container",),
)


class FakeEnvironment:
    """Echoes commands; `die` ends it, `lost` loses the sandbox."""

    def __init__(self, *, outputs: Any = None) -> None:
        self.commands: list[str] = []
        self.closed = False
        self._outputs = outputs

    @property
    def isolation(self) -> Isolation:
        return ISOLATION

    async def start(self) -> None:
        pass

    async def run(self, command: Any, timeout_seconds: float) -> CommandResult:
        self.commands.append(command)
        if command == "die":
            raise EnvironmentEnded(EndReason.shell_killed, "the shell was killed")
        if command == "lost":
            raise SandboxError("the sandbox was lost")
        output = self._outputs(len(self.commands)) if self._outputs else f"ran {command}\n"
        return CommandResult(output=output.encode(), exit_code=0, duration_seconds=0.1)

    async def put(self, path: str, data: bytes) -> None:
        pass

    async def get(self, path: str) -> bytes:
        return b""

    async def diff(self, directory: str, base: str = "HEAD") -> bytes:
        return "\n".join(self.commands).encode()

    async def close(self) -> None:
        self.closed = True

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class ShellTask:
    """Rewards `fix` among the commands, scored with an environment of its own."""

    def __init__(self, name: str = "sums") -> None:
        self.name = name
        self.scored_with: list[Any] = []

    def size(self, kind: Kind) -> int:
        return 10

    def instance(self, index: int, *, kind: Kind) -> Instance:
        return Instance(
            task=self.name,
            instance_id=f"shell-{index}",
            index=index,
            messages=(Message(role="user", content="fix it"),),
        )

    def score(self, instance: Instance, response: str) -> Score:
        raise AssertionError("scored without an environment")

    def environment_spec(self, instance: Instance) -> EnvironmentSpec:
        return EnvironmentSpec(backend=Backend.process, image=None)

    async def setup(self, instance: Instance, environment: Any) -> None:
        pass

    async def result(self, instance: Instance, environment: Any) -> bytes:
        return await environment.diff("/")

    async def score_in(
        self, instance: Instance, *, result: bytes, response: str, make_environment: Any
    ) -> Score:
        async with make_environment(self.environment_spec(instance)) as fresh:
            self.scored_with.append(fresh)
        return Score(reward=float(b"fix" in result))
