"""What the checks of environments stand on: a bench, their registers, and what they wait for."""

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from hpc.isolation import Feature
from prorl_hpc.environment import (
    Backend,
    EndReason,
    EnvironmentEnded,
    EnvironmentFactory,
    EnvironmentSpec,
    Limits,
    TransferError,
    processes,
)
from prorl_hpc.environment.shell import ShellEnvironment

PATIENCE_SECONDS = 240.0
"""For what ends by itself; never for what is expected to be stopped."""


class Bench:
    """One factory and one backend; makes environments with small changes to the spec."""

    def __init__(self, backend: Backend, image: Path | None, root: Path) -> None:
        self.backend, self.image, self.root = backend, image, root
        self.scratch = root / "scratch"
        self.factory = EnvironmentFactory(self.scratch)

    def spec(self, **changes: object) -> EnvironmentSpec:
        limits = Limits(start_seconds=PATIENCE_SECONDS)
        accept = frozenset(Feature) if self.backend is Backend.process else frozenset()
        inside = self.root / "work" if self.backend is Backend.process else Path("/tmp/work")
        base = EnvironmentSpec(
            backend=self.backend, image=self.image, directory=str(inside), limits=limits,
            accept_missing=accept,
        )  # fmt: skip
        known = {field.name for field in dataclasses.fields(Limits)}
        own = {name: changes.pop(name) for name in list(changes) if name in known}
        limits = dataclasses.replace(limits, **own)
        return dataclasses.replace(base, **({"limits": limits} | changes))

    @contextlib.asynccontextmanager
    async def open(self, **changes: object) -> AsyncIterator[ShellEnvironment]:
        async with self.factory.create(self.spec(**changes)) as environment:
            yield environment

    def assert_nothing_left(self) -> None:
        """No directory of an environment and no process of any is left."""
        for worker in self.scratch.iterdir():
            left = [entry.name for entry in worker.iterdir() if entry.is_dir()]
            assert left == [], left
        until(lambda: not holders(self.scratch), "processes of ended sandboxes remain")


def holders(scratch: Path) -> list[str]:
    """Command lines of processes that name this scratch, or carry a token of its workers."""
    found = []
    tokens = [worker.name.removeprefix("worker-") for worker in scratch.iterdir()]
    table = processes.snapshot()
    for pid, info in table.items():
        if not info.alive or pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            reaper = processes.__file__ in line
            if not reaper and (str(scratch) in line or any(t in line + environ for t in tokens)):
                found.append(f"{pid} {line}")
    return found


def until(holds: Callable[[], bool], message: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Polls for a condition."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, message
        time.sleep(0.05)


Check = Callable[[Bench], Awaitable[None]]
CHECKS: dict[str, Check] = {}
DESTRUCTIVE: dict[str, Check] = {}
ISOLATING: dict[str, Check] = {}
APPTAINER: dict[str, Check] = {}


def check(function: Check) -> Check:
    """For every backend."""
    CHECKS[function.__name__] = function
    return function


def isolating(function: Check) -> Check:
    """Only for backends that isolate."""
    ISOLATING[function.__name__] = function
    return function


def apptainer(function: Check) -> Check:
    """Only for Apptainer."""
    APPTAINER[function.__name__] = function
    return function


def destructive(function: Check) -> Check:
    """Only inside a sandbox, as an ordinary user."""
    DESTRUCTIVE[function.__name__] = function
    return function


async def say(environment: ShellEnvironment, command: str) -> str:
    result = await environment.run(command, PATIENCE_SECONDS)
    assert result.exit_code == 0, result
    return result.text.strip()


async def assert_ended(environment: ShellEnvironment, reason: EndReason) -> None:
    try:
        await environment.run("true", PATIENCE_SECONDS)
    except EnvironmentEnded as err:
        assert err.reason is reason, err.reason
    else:
        raise AssertionError("the environment still runs")


async def started(environment: ShellEnvironment, program: str) -> None:
    """Waits until the shell runs that program."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        assert environment._tree is not None
        for pid in environment._tree.payload():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == program:
                    return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{program} never ran")


async def assert_no_transfer(attempt: Awaitable[object]) -> None:
    try:
        await attempt
    except TransferError:
        return
    raise AssertionError("a transfer that can't be done was done")


async def settled(environment: ShellEnvironment) -> None:
    """The environment either works again or is over: typed, within the patience."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        try:
            result = await environment.run("/bin/echo alive", 20.0)
        except EnvironmentEnded:
            return
        if result.text.strip().endswith("alive"):
            return
    raise AssertionError("the environment neither works nor ends")
