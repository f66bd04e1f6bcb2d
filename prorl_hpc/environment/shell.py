"""One environment: a persistent shell in a sandbox, with limits, restarts and a clean end.

    run ─► channel (pipes) ─► status line                   the command ended
                          └─► "ended"                       the shell did: a fresh one, in place
                          └─► end of file                   the sandbox did: started again
    watchdog ─► tree.kill_commands                          a limit was exceeded

The same class drives every backend; they differ in `launch.prepare` alone. Knows nothing of
agents, tasks or scores.
"""

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass
from typing import Self

from hpc.container import Features
from hpc.errors import SandboxError
from hpc.isolation import Isolation
from prorl_hpc.environment import files, watchdog
from prorl_hpc.environment.base import (
    CommandResult,
    EndReason,
    EnvironmentEnded,
    EnvironmentSpec,
    SandboxStartError,
    Stop,
)
from prorl_hpc.environment.channel import CappedOutput, Channel
from prorl_hpc.environment.gate import StartGate
from prorl_hpc.environment.launch import Prepared, prepare
from prorl_hpc.environment.meter import Meter
from prorl_hpc.environment.prologue import setup_script, what_setup_does
from prorl_hpc.environment.scratch import Scratch, WorkerScratch
from prorl_hpc.environment.tree import SandboxTree, SharedSnapshot

TIMEOUT_CODE = 124
KILLED_CODE = 137
SETTLE_SECONDS = 10.0
"""How long a shell may take to answer once nothing is left for it to wait for."""

WATCH_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class _Done:
    """What the control pipe said about one command."""

    kind: str
    """`status`, `ended` (the shell) or `lost` (the sandbox)."""
    code: int


class ShellEnvironment:
    """Implements `Environment` on every backend."""

    def __init__(
        self, spec: EnvironmentSpec, *, features: Features, worker: WorkerScratch,
        snapshot: SharedSnapshot, gate: StartGate,
    ) -> None:  # fmt: skip
        self.spec = spec
        self._features, self._worker, self._snapshot = features, worker, snapshot
        self._gate = gate
        self._lock = asyncio.Lock()
        self._killing = (
            asyncio.Lock()
        )  # a new command waits until what it isn't to die with is dead
        self._scratch: Scratch | None = None
        self._prepared: Prepared | None = None
        self._channel: Channel | None = None
        self._tree: SandboxTree | None = None
        self._meter: Meter | None = None
        self._watch: asyncio.Task[None] | None = None
        self._reason: EndReason | None = None
        self._stop: Stop | None = None
        self._num_killed = 0
        self._busy = False
        self._unsettled: str | None = None
        self._started = self._last_used = time.monotonic()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def isolation(self) -> Isolation:
        """What separates it from the host; known after `start`."""
        if self._prepared is None:
            raise SandboxError("isolation is known only after start()")
        return self._prepared.isolation

    # --- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts the sandbox and its shell, behind the node's start gate."""
        if self._scratch is not None:
            raise SandboxError("start() was called twice on one environment")
        async with self._gate.start(self.spec.image):
            try:
                self._scratch = await asyncio.to_thread(self._worker.open)
                self._prepared = await asyncio.to_thread(
                    prepare, self.spec, features=self._features, scratch=self._scratch
                )
                await self._spawn()
            except BaseException:
                await self.close()
                raise
        self._meter = Meter(
            self._scratch.path, limits=self.spec.limits, groups=self._prepared.groups,
            snapshot=self._snapshot,
        )  # fmt: skip
        self._started = self._last_used = time.monotonic()
        self._watch = asyncio.create_task(self._watch_limits())

    async def _spawn(self) -> None:
        assert self._prepared and self._scratch
        self._channel = Channel.spawn(
            self._prepared.argv, environment=self._prepared.environment,
            scratch=self._scratch.path, groups=self._prepared.groups,
        )  # fmt: skip
        self._tree = SandboxTree(scratch=self._scratch, root=self._channel.process.pid)
        await self._greet(self.spec.limits.start_seconds)

    async def _greet(self, timeout_seconds: float) -> None:
        """Waits for the shell's hello and sets it up. Raises SandboxStartError."""
        assert self._channel and self._tree
        channel, tree = self._channel, self._tree
        end = time.monotonic() + timeout_seconds
        line: bytes | None = b""
        while line is not None and not line.startswith(b"hello "):
            try:
                line = await channel.control_line(end - time.monotonic())
            except TimeoutError as err:
                raise SandboxStartError(
                    f"no shell after start_seconds={timeout_seconds:g}: {channel.diagnostics}"
                ) from err
        if line is None:
            said = channel.diagnostics or "it ended without a word; is bash in the image?"
            raise SandboxStartError(f"{self.spec.backend} {self.spec.image}: {said}")
        if not await asyncio.to_thread(tree.adopt_inner, int(line.split()[1])):
            raise SandboxStartError("the shell was gone before it could be used")
        sink = CappedOutput(4096)
        assert self._prepared
        script = setup_script(self.spec, home=self._prepared.home)
        done = await self._exchange(script.encode(), end - time.monotonic(), sink)
        if done is None or done.kind != "status" or done.code != 0:
            said = sink.value().decode(errors="replace").strip() or channel.diagnostics
            raise SandboxStartError(f"{what_setup_does(self.spec)} failed: {said}")

    async def close(self) -> None:
        """Ends every process and removes the scratch."""
        self._reason = self._reason or EndReason.closed
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        await self._end_sandbox()
        if self._scratch is not None:
            scratch, self._scratch = self._scratch, None
            await asyncio.to_thread(self._worker.release, scratch)

    async def _end_sandbox(self) -> None:
        channel, tree = self._channel, self._tree
        self._channel = self._tree = None
        if channel is None or tree is None:
            return
        await asyncio.to_thread(tree.end)
        channel.close()
        await asyncio.to_thread(channel.process.wait)

    # --- commands --------------------------------------------------------------------------

    async def run(self, command: str | bytes, timeout_seconds: float) -> CommandResult:
        """Runs `command` in the persistent shell."""
        return await self._run(command, timeout_seconds, self.spec.limits.output_bytes)

    async def _run(
        self, command: str | bytes, timeout_seconds: float, output_bytes: int
    ) -> CommandResult:
        text = command.encode("utf-8", "surrogateescape") if isinstance(command, str) else command
        if b"\0" in text:
            raise ValueError("command holds a NUL byte, which no shell can take")
        async with self._lock:
            async with self._killing:
                self._require_alive()
            await self._settle()
            assert self._meter
            self._meter.oom_killed()  # what was killed between commands isn't this one's doing
            sink = CappedOutput(output_bytes)
            began = time.monotonic()
            self._busy = True
            try:
                done = await self._exchange(text, timeout_seconds, sink)
                timed_out = done is None
                if done is None:
                    done = await self._interrupt(sink)
                duration = time.monotonic() - began
                restarted = await self._recover(done)
            finally:
                self._busy = False
                self._last_used = time.monotonic()
            stopped, self._stop = self._stop, None
            if stopped is None and done.code != 0 and self._meter.oom_killed():
                stopped = Stop.memory
            code = KILLED_CODE if stopped else done.code
            return CommandResult(
                output=sink.value(),
                exit_code=TIMEOUT_CODE if timed_out else code,
                duration_seconds=duration,
                timed_out=timed_out,
                truncated=sink.truncated,
                stopped_for=Stop.timeout if timed_out else stopped,
                shell_restarted=restarted,
            )

    def _require_alive(self) -> None:
        if self._reason is not None:
            raise EnvironmentEnded(self._reason, f"the environment is over: {self._reason}")
        if self._channel is None:
            raise SandboxError("run() before start()")

    async def _exchange(
        self, text: bytes, timeout_seconds: float, sink: CappedOutput
    ) -> _Done | None:
        """Sends one command and waits for its end; None when the time is over."""
        assert self._channel
        channel = self._channel
        name = secrets.token_hex(8)
        self._unsettled = name
        channel.capture(sink)
        try:
            async with asyncio.timeout(max(timeout_seconds, 0.0)):
                await channel.write(name.encode() + b"\n" + text + b"\0")
                return await self._status(name)
        except TimeoutError:
            return None
        except BrokenPipeError:
            self._unsettled = None
            return _Done("lost", KILLED_CODE)
        finally:
            channel.release()

    async def _status(self, name: str) -> _Done:
        assert self._channel
        while True:
            line = await self._channel.control_line(float(1 << 30))
            if line is None:
                self._unsettled = None
                return _Done("lost", KILLED_CODE)
            word, _, code = line.partition(b" ")
            if word in (b"ended", name.encode()) and code.isdigit():
                self._unsettled = None
                return _Done("ended" if word == b"ended" else "status", int(code))

    async def _interrupt(self, sink: CappedOutput) -> _Done:
        """Ends a command that is over its time: its processes, then its loop, then its shell."""
        assert self._channel and self._tree and self._unsettled
        channel, tree, name = self._channel, self._tree, self._unsettled
        channel.capture(sink)
        try:
            steps = (
                (tree.kill_commands, 1.0), (tree.interrupt_shell, 1.0),
                (tree.kill_commands, 1.0), (tree.kill_shell, SETTLE_SECONDS),
            )  # fmt: skip
            for step, patience_seconds in steps:
                await asyncio.to_thread(step)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_seconds):
                        return await self._status(name)
        finally:
            channel.release()
        self._unsettled = None
        return _Done("lost", KILLED_CODE)

    async def _settle(self) -> None:
        """Ends what a cancelled `run` left behind."""
        if self._unsettled is not None:
            await self._recover(await self._interrupt(CappedOutput(2)))
            self._require_alive()

    async def _recover(self, done: _Done) -> bool:
        """Brings a shell back if this command cost one. True when it did."""
        if done.kind == "status":
            return False
        if self._reason is not None:
            raise EnvironmentEnded(self._reason, f"the environment is over: {self._reason}")
        if done.kind == "lost" or done.code > 128:
            self._num_killed += 1
        if self._num_killed > self.spec.limits.num_shell_restarts:
            await self._finish(EndReason.shell_killed)
            return False
        try:
            if done.kind == "ended":
                await self._greet(SETTLE_SECONDS)
            else:
                await self._end_sandbox()
                await self._spawn()
        except SandboxStartError:
            # it started before, and the agent had its hands on it since
            await self._finish(EndReason.shell_killed)
            return False
        return True

    async def _finish(self, reason: EndReason) -> None:
        self._reason = self._reason or reason
        await self._end_sandbox()

    # --- limits ----------------------------------------------------------------------------

    async def _watch_limits(self) -> None:
        assert self._meter
        limits = self.spec.limits
        while self._reason is None:
            await asyncio.sleep(WATCH_SECONDS)
            last_used = None if self._busy else self._last_used
            now = time.monotonic()
            over = watchdog.expired(
                now=now, started=self._started, last_used=last_used, limits=limits
            )
            if over is not None:
                self._reason = over
                if self._tree is not None:
                    await asyncio.to_thread(self._tree.end)
                return
            tree = self._tree
            if tree is None or not tree.inner:
                continue
            stop = await asyncio.to_thread(self._meter.judge, tree, now=now, busy=self._busy)
            if stop is not None:
                self._stop = self._stop or stop
                async with self._killing:
                    await asyncio.to_thread(tree.stop, limits.memory_bytes)

    # --- files -----------------------------------------------------------------------------

    async def put(self, path: str, data: bytes) -> None:
        """Writes a file inside; symlinks are followed inside, never on the host."""
        await files.put(self, path, data)

    async def get(self, path: str) -> bytes:
        """Reads a regular file from inside."""
        return await files.get(self, path)

    async def diff(self, directory: str, base: str = "HEAD") -> bytes:
        """Stops all other processes, then `git diff` of the tree against `base`."""
        async with self._lock:
            self._require_alive()
            await self._settle()
            assert self._tree
            await asyncio.to_thread(self._tree.kill_commands)
        return await files.diff(self, directory, base)

    @property
    def transfer(self) -> files.Doors:
        """The two directories through which files travel."""
        self._require_alive()
        assert self._prepared and self._scratch
        return files.Doors(
            inbox_host=self._scratch.inbox, inbox=self._prepared.inbox,
            outbox_host=self._scratch.outbox, outbox=self._prepared.outbox,
        )  # fmt: skip
