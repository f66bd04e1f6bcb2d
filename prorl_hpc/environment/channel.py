"""The pipes to a persistent bash: messages in, output and control lines out.

    worker                               sandbox
      stdin  ── id \\n command \\0 ──►     inner shell reads, evaluates
      stdout ◄── output of commands ──   standard output and error of every command
      stderr ◄── \\1id exit_code \\n ──    control; the runtime's own words before the shell lives

Two shells: the outer one limits and restarts, the inner one is the agent's. Each has its own
process group, so that `kill -9 0` reaches neither the outer shell nor the runtime. Knows nothing
of images, trees of processes or the meaning of commands.
"""

import asyncio
import contextlib
import fcntl
import os
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc.cgroups import enter_script
from prorl_hpc.environment.base import Limits, SandboxStartError
from prorl_hpc.environment.processes import PID_FILE

END_OF_INPUT = 213
"""Exit code with which the inner shell says that its worker closed the pipe."""

INTERRUPTED = 142
THREAD_ALLOWANCE = 128
"""The kernel counts threads, the runtime's too; the watchdog counts processes and acts first."""

READ_BYTES = 1 << 16
DIAGNOSTIC_BYTES = 4096

# Every name of the shells' own begins with __prorl. `continue` with a large count leaves all
# loops of a runaway command but not the shell; the loop's head then reports the preset code.
INNER = r"""
trap '[ -n "$__prorl_busy" ] && continue 100000' USR1
__prorl_id= __prorl_code=0 __prorl_busy=
builtin printf '\001hello %d\n' "$BASHPID" >&3
while {
  [ -n "$__prorl_id" ] && builtin printf '\001%s %d\n' "$__prorl_id" "$__prorl_code" >&3
  IFS= builtin read -r -d '' -u 4 __prorl_message
}; do
  __prorl_id=${__prorl_message%%$'\n'*}
  __prorl_code=142 __prorl_busy=1
  builtin eval "${__prorl_message#*$'\n'}" </dev/null >&5 2>&1 3>&- 4<&- 5>&-
  __prorl_code=$? __prorl_busy=
done
exit 213
"""

OUTER = r"""
exec 3>&2 4<&0 5>&1 </dev/null >/dev/null 2>&1
set -m
%(limits)s
while :; do
  bash --norc --noprofile -c "$0" &
  wait $!
  code=$?
  kill -9 -- -$! && wait $!
  [ "$code" -eq 213 ] && exit 0
  printf '\001ended %%d\n' "$code" >&3
done
"""


def shell_argv(limits: Limits, *, own_process_count: bool) -> list[str]:
    """The command that the sandbox runs. Limits that the kernel refuses are the watchdog's."""
    lines = [
        "ulimit -c 0",
        f"ulimit -d {limits.memory_bytes // 1024}",
        f"ulimit -f {limits.disk_bytes // 1024}",
    ]
    if own_process_count:
        lines.append(f"ulimit -u {limits.num_processes + THREAD_ALLOWANCE}")
    outer = OUTER % {"limits": "\n".join(lines)}
    return ["bash", "--norc", "--noprofile", "-c", outer, INNER]


class CappedOutput:
    """Keeps the head and the tail of a stream, and counts what fell out between them."""

    def __init__(self, limit_bytes: int) -> None:
        self._head_bytes = limit_bytes - limit_bytes // 2
        self._tail_bytes = limit_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream."""
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        excess = len(self._tail) - self._tail_bytes
        if excess > 0:
            del self._tail[:excess]
            self._dropped += excess

    @property
    def truncated(self) -> bool:
        """True when bytes were dropped."""
        return self._dropped > 0

    def value(self) -> bytes:
        """Head, mark, tail."""
        mark = f"\n[... {self._dropped} bytes omitted ...]\n".encode() if self._dropped else b""
        return bytes(self._head) + mark + bytes(self._tail)


class Channel:
    """One started sandbox process and its three pipes. Belongs to one event loop."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin and process.stdout and process.stderr
        self.process = process
        self._stdin, self._stdout = process.stdin.fileno(), process.stdout.fileno()
        self._stderr = process.stderr.fileno()
        for descriptor in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(descriptor, False)
        self._loop = asyncio.get_running_loop()
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._partial = b""
        self._diagnostics = b""
        self._sink: CappedOutput | None = None
        self._loop.add_reader(self._stderr, self._on_control)

    @classmethod
    def spawn(
        cls, argv: Sequence[str], *, environment: Mapping[str, str], scratch: Path,
        groups: Sequence[Path] = (),
    ) -> "Channel":  # fmt: skip
        """Starts `argv` in a session of its own, inside the control groups; its id is on disk
        before it runs.

        Raises SandboxStartError when the program can't be started.
        """
        script = f'echo $$ >"$0" || exit 125; {enter_script()}'
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", script, str(scratch / PID_FILE), *map(str, groups), "--", *argv],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=dict(environment), cwd=scratch, start_new_session=True,
            )  # fmt: skip
        except OSError as err:
            raise SandboxStartError(f"{argv[0]} can't be started: {err.strerror}") from err
        return cls(process)

    @property
    def diagnostics(self) -> str:
        """The last words of the runtime, one line."""
        text = self._diagnostics.decode(errors="replace")
        return " | ".join(line.strip() for line in text.splitlines() if line.strip())[-600:]

    def _on_control(self) -> None:
        try:
            data = os.read(self._stderr, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._stderr)
            self._lines.put_nowait(None)
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[-READ_BYTES:]
        for line in lines:
            if line.startswith(b"\1"):
                self._lines.put_nowait(line[1:])
            else:
                self._diagnostics = (self._diagnostics + line + b"\n")[-DIAGNOSTIC_BYTES:]

    async def control_line(self, timeout_seconds: float) -> bytes | None:
        """The next control line; None at the end of the sandbox. Raises TimeoutError."""
        async with asyncio.timeout(max(timeout_seconds, 0.0)):
            line = await self._lines.get()
        if line is None:
            self._lines.put_nowait(None)  # the end stays the end
        return line

    def capture(self, sink: CappedOutput) -> None:
        """Starts reading output. Between commands nobody reads: noisy background work waits."""
        self._sink = sink
        self._loop.add_reader(self._stdout, self._on_output)

    def release(self) -> None:
        """Takes what the pipe holds now and stops reading."""
        if self._sink is None:
            return
        self._loop.remove_reader(self._stdout)
        waiting = bytearray(4)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._stdout, termios.FIONREAD, waiting)
        (left,) = struct.unpack("i", waiting)
        while left > 0:
            try:
                data = os.read(self._stdout, min(left, READ_BYTES))
            except (BlockingIOError, OSError):
                break
            if not data:
                break
            self._sink.feed(data)
            left -= len(data)
        self._sink = None

    def _on_output(self) -> None:
        try:
            data = os.read(self._stdout, READ_BYTES)
        except BlockingIOError:
            return
        if data and self._sink is not None:
            self._sink.feed(data)
        else:
            self._loop.remove_reader(self._stdout)

    async def write(self, data: bytes) -> None:
        """Writes all of `data`. Raises BrokenPipeError when the sandbox is gone."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                await self._writable()

    async def _writable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._stdin, _resolve, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(self._stdin)

    def close(self) -> None:
        """Lets go of the pipes; the process itself is ended by whoever knows its tree."""
        for descriptor in (self._stdout, self._stderr):
            self._loop.remove_reader(descriptor)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
