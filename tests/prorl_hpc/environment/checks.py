"""What must hold for every backend: a suite that pytest runs here, and any user runs as a script.

    python checks.py BACKEND IMAGE NAME     (IMAGE "-": none) exit 0 when the check holds

Needs the standard library alone. `destructive` checks attack their own sandbox and may run only
inside one, as an ordinary user.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))

from hpc.container_probe import probe  # noqa: E402
from hpc.errors import IsolationError  # noqa: E402
from hpc.isolation import Feature  # noqa: E402
from prorl_hpc.environment import (  # noqa: E402
    Backend,
    EndReason,
    EnvironmentEnded,
    EnvironmentFactory,
    EnvironmentSpec,
    Limits,
    SandboxStartError,
    Stop,
    TransferError,
    processes,
)  # fmt: skip
from prorl_hpc.environment.shell import ShellEnvironment  # noqa: E402

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


# --- the shell ---------------------------------------------------------------------------------


@check
async def state_persists(bench: Bench) -> None:
    async with bench.open(variables={"GREETING": 'it\'s $HOME\n"ü"'}) as environment:
        assert await say(environment, 'printf %s "$GREETING"') == 'it\'s $HOME\n"ü"'
        assert await say(environment, "X=5; f() { echo f$X; }; cd /; pwd") == "/"
        assert await say(environment, "f; pwd") == "f5\n/"
        failed = await environment.run("(exit 7)", PATIENCE_SECONDS)
        assert failed.exit_code == 7
        broken = await environment.run("echo 'never closed", PATIENCE_SECONDS)
        assert broken.exit_code != 0
        assert not broken.shell_restarted
        assert await say(environment, "exec >/dev/null; echo hidden") == ""
        assert await say(environment, "echo seen; cat") == "seen"
    bench.assert_nothing_left()


@check
async def binary_and_large_output(bench: Bench) -> None:
    async with bench.open(output_bytes=1000) as environment:
        raw = await environment.run(r"printf '\377\000\001\r\n'", PATIENCE_SECONDS)
        assert raw.output == b"\xff\x00\x01\r\n"
        program = "i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done"
        large = await environment.run(program, PATIENCE_SECONDS)
        # 10*2 + 90*3 + 900*4 + 2000*5 bytes in all, 500 kept at each end
        assert large.truncated
        assert large.output.startswith(b"0\n1\n2\n")
        assert large.output.endswith(b"2998\n2999\n")
        assert f"[... {13890 - 1000} bytes omitted ...]".encode() in large.output
        for bad in ("a\0b", b"\0"):
            with_error = False
            try:
                await environment.run(bad, 1.0)
            except ValueError:
                with_error = True
            assert with_error


@check
async def timeout_kills_the_command_and_not_the_shell(bench: Bench) -> None:
    async with bench.open() as environment:
        await say(environment, "X=kept")
        result = await environment.run("sleep 600 & (sleep 601; true) | sleep 602", 1.0)
        assert result.timed_out
        assert result.exit_code == 124
        assert result.stopped_for is Stop.timeout
        assert not result.shell_restarted
        left = await environment.run("echo $X; jobs -r", PATIENCE_SECONDS)
        assert left.text.strip().endswith("kept"), left
        spinning = await environment.run("while :; do while :; do :; done; done", 0.5)
        assert spinning.timed_out
        assert await say(environment, "echo $X") == "kept"


@check
async def a_stubborn_shell_is_replaced(bench: Bench) -> None:
    async with bench.open() as environment:
        await say(environment, "X=lost")
        result = await environment.run("trap '' USR1; while :; do :; done", 0.5)
        assert result.timed_out
        assert result.shell_restarted
        assert await say(environment, "echo [$X]") == "[]"


@check
async def an_ended_shell_is_replaced(bench: Bench) -> None:
    async with bench.open(variables={"A": "1"}) as environment:
        for code in (3, 0, 4):
            result = await environment.run(f"A=2; exit {code}", PATIENCE_SECONDS)
            assert (result.exit_code, result.shell_restarted) == (code, True)
            assert await say(environment, "echo $A") == "1"
        killed = await environment.run("kill -9 $$", PATIENCE_SECONDS)
        assert (killed.exit_code, killed.shell_restarted) == (137, True)
        assert await say(environment, "echo $A") == "1"
        last = await environment.run("kill -9 $$", PATIENCE_SECONDS)
        assert (last.exit_code, last.shell_restarted) == (137, False)
        await assert_ended(environment, EndReason.shell_killed)
    bench.assert_nothing_left()


async def assert_ended(environment: ShellEnvironment, reason: EndReason) -> None:
    try:
        await environment.run("true", PATIENCE_SECONDS)
    except EnvironmentEnded as err:
        assert err.reason is reason, err.reason
    else:
        raise AssertionError("the environment still runs")


@check
async def a_prologue_runs_in_every_shell(bench: Bench) -> None:
    async with bench.open(variables={"A": "1"}, prologue='export B="$A$A"; pwd > /dev/null') as one:
        assert await say(one, "echo $B") == "11"
        await one.run("B=; exit 3", PATIENCE_SECONDS)
        assert await say(one, "echo $B") == "11"


@check
async def a_cancelled_command_leaves_a_usable_shell(bench: Bench) -> None:
    async with bench.open() as environment:
        await say(environment, "X=kept")
        task = asyncio.create_task(environment.run("sleep 600", 600.0))
        await started(environment, "sleep")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert await say(environment, "echo $X") == "kept"


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


@check
async def wall_and_idle_time_end_it(bench: Bench) -> None:
    for name, reason in (("wall_seconds", EndReason.wall), ("idle_seconds", EndReason.idle)):
        async with bench.open(**{name: 0.5}) as environment:
            end = time.monotonic() + PATIENCE_SECONDS
            while environment._reason is None:
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            await assert_ended(environment, reason)
        bench.assert_nothing_left()
    async with bench.open(wall_seconds=1.0) as environment:
        try:
            await environment.run("sleep 600", 600.0)
        except EnvironmentEnded as err:
            assert err.reason is EndReason.wall
        else:
            raise AssertionError("the wall time passed unseen")


@check
async def what_cannot_start_says_why(bench: Bench) -> None:
    bad: list[dict[str, object]] = [
        {"directory": "/proc/none"}, {"variables": {"a b": "1"}}, {"prologue": "cd /nowhere"},
    ]  # fmt: skip
    if bench.backend is not Backend.process:
        bad.append({"image": bench.root / "absent.sif"})
    for changes in bad:
        try:
            async with bench.open(**changes):
                raise AssertionError(f"{changes} started")
        except SandboxStartError as err:
            (value,) = changes.values()
            named = value if isinstance(value, (str, Path)) else "a b"
            assert str(named) in str(err), err
    bench.assert_nothing_left()


# --- files -------------------------------------------------------------------------------------


@check
async def files_travel_both_ways(bench: Bench) -> None:
    async with bench.open(transfer_bytes=100_000) as environment:
        data = bytes(range(256)) * 300
        await environment.put("new dir/it's ü.bin", data)
        assert await environment.get("new dir/it's ü.bin") == data
        await environment.put("empty", b"")
        assert await environment.get("empty") == b""
        await say(environment, "head -c 100001 /dev/zero > big; mkfifo pipe; set -e; cat() { :; }")
        for path in ("absent", "/dev/zero", ".", "big", "pipe", "", "a\0"):
            await assert_no_transfer(environment.get(path))
        await assert_no_transfer(environment.put("/proc/none/x", b"1"))
        assert await say(environment, "echo still") == "still"
    bench.assert_nothing_left()


async def assert_no_transfer(attempt: Awaitable[object]) -> None:
    try:
        await attempt
    except TransferError:
        return
    raise AssertionError("a transfer that can't be done was done")


@check
async def diff_holds_new_changed_and_binary_files(bench: Bench) -> None:
    async with bench.open() as environment:
        git = "git -c user.name=a -c user.email=a@b -c init.defaultBranch=main"
        await say(environment, f"{git} init -q repo && cd repo && echo 1 > old && echo x > gone")
        await say(
            environment, f"git add . && {git} commit -q -m first && echo ignored > .gitignore"
        )
        await say(environment, r"echo 2 > old; rm gone; printf '\0\377' > raw; echo 3 > 'a b'")
        base = await say(environment, "git rev-parse HEAD")
        await say(environment, f"git add old && {git} commit -q -m second; touch ignored")
        await say(environment, "git config diff.external /bin/false; git config diff.noprefix true")
        await say(environment, "(while :; do echo noise; done) & true")
        where = environment.spec.directory + "/repo"
        patch = await environment.diff(where, base)
        assert b"noise" not in patch
        for part in (b"a/old b/old", b"a/gone b/gone", b"GIT binary patch", b"+3", b".gitignore"):
            assert part in patch, (part, patch)
        await say(environment, f"git config --unset diff.external; rm .gitignore; "
                               f"git reset -q --hard {base} && git clean -qfdx")  # fmt: skip
        await environment.put("/tmp/x.patch" if bench.backend is not Backend.process else "x.patch",
                              patch)  # fmt: skip
        name = "/tmp/x.patch" if bench.backend is not Backend.process else "x.patch"
        await say(environment, f"git apply {name}; [ ! -e gone ] && cat old 'a b'")
        await assert_no_transfer(environment.diff("/proc"))


@isolating
async def links_lead_nowhere_on_the_host(bench: Bench) -> None:
    secret = bench.root / "secret"
    secret.write_text("of the host")
    async with bench.open() as environment:
        await say(environment, f"mkdir -p {bench.root} 2>/dev/null; ln -s {secret} out; "
                               f"ln -s {bench.root} dir; ln -s /.prorl/out/x loop")  # fmt: skip
        await assert_no_transfer(environment.get("out"))
        with contextlib.suppress(TransferError):
            await environment.put("dir/planted", b"1")
        assert not (bench.root / "planted").exists()
        # the outbox itself: a link, a fifo and a hard link under every name that may be read next
        await say(environment, f"cd /.prorl/out && ln -s {secret} x && mkfifo y && echo 1 > z")
        denied = await environment.run("echo 1 > /.prorl/in/planted", PATIENCE_SECONDS)
        assert denied.exit_code != 0
        await environment.put("/tmp/ok", b"1")
        assert await environment.get("/tmp/ok") == b"1"
    assert secret.read_text() == "of the host"
    bench.assert_nothing_left()


# --- isolation ---------------------------------------------------------------------------------


@isolating
async def the_host_is_out_of_sight(bench: Bench) -> None:
    marker = bench.root / "of-the-host"
    marker.write_text("1")
    os.environ["PRORL_CHECK_SECRET"] = "leak"
    async with bench.open() as environment:
        assert environment.isolation.is_full or bench.backend is Backend.bubblewrap
        assert environment.isolation.network_none
        seen = await environment.run(f"cat {marker}; ls {Path.home()}", PATIENCE_SECONDS)
        assert seen.exit_code != 0
        assert b"leak" not in (await environment.run("env", PATIENCE_SECONDS)).output
        pids = await say(environment, "echo /proc/[0-9]*")
        assert len(pids.split()) < 10, pids
        other = await environment.run(f"ls /proc/{os.getpid()}/fd", PATIENCE_SECONDS)
        if os.getpid() > 100:  # small numbers may be taken inside as well
            assert other.exit_code != 0
        devices = await say(environment, "cat /proc/net/dev")
        assert [line.split(":")[0].strip() for line in devices.splitlines()[2:]] == ["lo"]
    del os.environ["PRORL_CHECK_SECRET"]


@isolating
async def sockets_lead_nowhere(bench: Bench) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        server.setblocking(False)
        async with bench.open() as environment:
            for host in ("127.0.0.1", "10.0.0.1", "1.1.1.1"):
                tried = await environment.run(f"echo hi > /dev/tcp/{host}/{port}", 20.0)
                assert tried.exit_code != 0
        try:
            server.accept()
        except BlockingIOError:
            return
        raise AssertionError("a connection came out of the sandbox")


@isolating
async def values_never_show_in_command_lines(bench: Bench) -> None:
    async with bench.open(variables={"KEY": "s3cr3t-value"}) as environment:
        await environment.put("/tmp/f", b"s3cr3t-value")
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    assert b"s3cr3t-value" not in (entry / "cmdline").read_bytes()


@check
async def a_killed_worker_leaves_nothing(bench: Bench) -> None:
    """`kill -9` of a worker in the middle of a command: the reaper ends all and cleans up."""
    root = bench.root / "killed"
    root.mkdir()
    argv = [sys.executable, "-B", str(Path(__file__).resolve()), bench.backend.value,
            str(bench.image or "-"), "worker", str(root)]  # fmt: skip
    worker = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    told = await asyncio.to_thread(worker.stdout.readline)
    shell = json.loads(told)["inner"]
    sleeping = [pid for pid in processes.descendants([shell], processes.snapshot()) if pid != shell]
    assert sleeping
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    until(
        lambda: (
            not any(
                info is not None and info.alive
                for info in map(processes.snapshot().get, [shell, *sleeping])
            )
        ),
        "the sandbox outlived its worker",
    )
    scratch = root / "scratch"
    until(lambda: not any(entry.is_dir() for worker in scratch.iterdir()
                          for entry in worker.iterdir()), "the scratch outlived")  # fmt: skip
    EnvironmentFactory(scratch).close()  # the next attempt removes the last of it
    assert list(scratch.iterdir()) == []


async def be_a_worker(bench: Bench) -> None:
    """The victim of `a_killed_worker_leaves_nothing`."""
    async with bench.open() as environment:
        task = asyncio.create_task(environment.run("sleep 600 & sleep 601", 600.0))
        assert environment._tree is not None
        inner = environment._tree.inner
        while len(processes.descendants([inner], processes.snapshot())) < 3:
            await asyncio.sleep(0.05)
        print(json.dumps({"inner": inner}), flush=True)
        await task


# --- attacks -----------------------------------------------------------------------------------


@destructive
async def everything_is_removed(bench: Bench) -> None:
    async with bench.open() as environment, bench.open() as neighbour:
        await environment.run("rm -rf --no-preserve-root / 2>/dev/null", PATIENCE_SECONDS)
        await environment.run("rm -rf /* /.prorl/out/* 2>/dev/null", PATIENCE_SECONDS)
        with contextlib.suppress(TransferError):
            await environment.get("/etc/passwd")
        assert await say(environment, "echo alive") == "alive"
        assert await say(neighbour, "echo alive; cd /usr") == "alive"
    async with bench.open() as environment:
        assert await say(environment, "ls /usr/bin/env") == "/usr/bin/env"
    bench.assert_nothing_left()


@destructive
async def a_fork_bomb_is_stopped(bench: Bench) -> None:
    async with bench.open(num_processes=64) as environment, bench.open() as neighbour:
        bomb = await environment.run("b() { b | b & }; b; sleep 1000", 20.0)
        assert bomb.stopped_for in (Stop.processes, Stop.timeout), bomb
        assert await say(neighbour, "echo alive") == "alive"
        await settled(environment)
    bench.assert_nothing_left()


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


@destructive
async def a_full_disk_is_stopped(bench: Bench) -> None:
    async with bench.open(disk_bytes=64 << 20) as environment:
        one = await environment.run("head -c 100000000 /dev/zero > one", PATIENCE_SECONDS)
        assert one.exit_code != 0  # the largest single file
        script = "rm -f one; i=0; while :; do head -c 8000000 /dev/zero > f$i; i=$((i+1)); done"
        many = await environment.run(script, 60.0)
        assert many.stopped_for is Stop.disk or many.timed_out, many
        await environment.run("rm -f f*", PATIENCE_SECONDS)
        await settled(environment)
    bench.assert_nothing_left()


@destructive
async def much_memory_is_stopped(bench: Bench) -> None:
    async with bench.open(memory_bytes=256 << 20) as environment:
        alone = await environment.run("x=$(head -c 600000000 /dev/zero | tr '\\0' x)", 60.0)
        assert alone.exit_code != 0
        async with bench.open(memory_bytes=200 << 20) as other:
            eat = "python3 -c 'import time; x = bytearray(120 << 20); time.sleep(600)'"
            together = await other.run(f"{eat} & {eat} & {eat} & wait", PATIENCE_SECONDS)
            assert together.stopped_for is Stop.memory, together
            await settled(other)
    bench.assert_nothing_left()


@destructive
async def signals_to_everyone_stay_inside(bench: Bench) -> None:
    async with bench.open(num_shell_restarts=3) as environment, bench.open() as neighbour:
        await say(environment, "echo kept > kept")
        for attack in ("kill -9 0", "kill -9 -1", "kill -STOP 0; kill -STOP $$"):
            result = await environment.run(f"{attack}; sleep 600", 20.0)
            assert result.shell_restarted, (attack, result)
            assert await say(environment, "cat kept") == "kept"
        assert await say(neighbour, "echo alive") == "alive"
        await environment.run("kill -9 -1; sleep 600", PATIENCE_SECONDS)
        await assert_ended(environment, EndReason.shell_killed)
    bench.assert_nothing_left()


@destructive
async def a_daemon_ends_with_its_environment(bench: Bench) -> None:
    async with bench.open() as environment:
        program = (
            "import os, time\n"
            "if os.fork() == 0:\n"
            " os.setsid()\n"
            " if os.fork() == 0:\n"
            "  os.environ.clear(); os.close(1); os.close(2); time.sleep(987)\n"
        )
        await environment.put("/tmp/daemon.py", program.encode())
        await say(environment, "env -i /usr/bin/python3 /tmp/daemon.py; sleep 0.2")
        before = await say(environment, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "daemon.py" in before
        await environment.run("sleep 600", 0.5)  # a timeout kills it too
        after = await say(environment, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "daemon.py" not in after
        await say(environment, "env -i /usr/bin/python3 /tmp/daemon.py; sleep 0.2")
        assert environment._tree is not None
        pids = environment._tree.payload()
    table = processes.snapshot()
    assert not [pid for pid in pids if pid in table and table[pid].alive]
    bench.assert_nothing_left()


@destructive
async def a_flood_of_output_is_capped(bench: Bench) -> None:
    async with bench.open() as environment:
        flood = await environment.run("head -c 100000000 /dev/zero; echo end", PATIENCE_SECONDS)
        assert flood.truncated
        assert flood.output.endswith(b"end\n")
        assert len(flood.output) < 70_000
        await say(environment, "(yes >&1 &) ; true")
        # the noise may crowd the words out of the capped output, never the command
        assert (await environment.run("test -e /usr", PATIENCE_SECONDS)).exit_code == 0


@isolating
async def many_at_once(bench: Bench) -> None:
    """32 environments at once, each with its own state."""

    async def one(number: int) -> str:
        async with bench.open() as environment:
            await say(environment, f"N={number}; echo $N > file")
            await barrier.wait()
            return await say(environment, "echo $N $(cat file)")

    barrier = asyncio.Barrier(32)
    told = await asyncio.gather(*(one(number) for number in range(32)))
    assert told == [f"{number} {number}" for number in range(32)]
    bench.assert_nothing_left()


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@isolating
async def many_times(bench: Bench) -> None:
    """Start/stop cycles (PRORL_CYCLES, 100) leave no process, mount, file or descriptor."""
    cycles = int(os.environ.get("PRORL_CYCLES", "100"))
    async with bench.open():
        pass
    mounts, descriptors = Path("/proc/self/mounts").read_text(), num_descriptors()

    async def worker(count: int) -> None:
        for _ in range(count):
            async with bench.open() as environment:
                assert await say(environment, "echo ok > f; cat f") == "ok"

    await asyncio.gather(*(worker(cycles // 4) for _ in range(4)))
    bench.assert_nothing_left()
    assert Path("/proc/self/mounts").read_text() == mounts
    assert num_descriptors() <= descriptors
    homes = [Path.home() / name / "instances" for name in (".apptainer", ".singularity")]
    assert not any(list(home.rglob("*.json")) for home in homes if home.is_dir())


@apptainer
async def a_site_that_lacks_a_feature_refuses_or_records(bench: Bench) -> None:
    """The real runtime behind a front that refuses one option, as such a site does."""
    real = shutil.which("apptainer") or shutil.which("singularity")
    cases = [
        (Feature.network_none, "--net", "max_net_namespaces"),
        (Feature.overlay, "--overlay", "enable overlay"),
        (Feature.pid_namespace, "--pid", "allow pid ns"),
    ]
    for feature, option, fix in cases:
        front = bench.root / f"apptainer-{feature}"
        front.write_text(
            f'#!/bin/sh\nfor word; do [ "$word" = {option} ] && '
            f'{{ echo "FATAL: {option} is not allowed by the administrator" >&2; exit 255; }}; '
            f'done\nexec {real} "$@"\n'
        )
        front.chmod(0o755)
        features = probe(str(front))
        assert features.container == frozenset(Feature) - {feature}, features
        factory = EnvironmentFactory(bench.root / f"scratch-{feature}", features=features)
        try:
            async with factory.create(bench.spec()):
                raise AssertionError(f"started without {feature}")
        except IsolationError as err:
            assert fix in str(err), err
            assert "not allowed by the administrator" in str(err), err
        accepting = bench.spec(accept_missing=frozenset({feature}))
        async with factory.create(accepting) as environment:
            assert environment.isolation.overridden == (feature.value,)
            await say(environment, "X=1; sleep 600 & true")
            stopped = await environment.run("sleep 600", 0.5)
            assert stopped.timed_out
            # the shell may tell of the killed background job as well
            assert "1" in (await say(environment, "echo $X")).splitlines()
        until(lambda made=factory: not holders(made._worker.path.parent), "processes remain")
        factory.close()


async def the_kernel_limits_it(bench: Bench) -> None:
    """Only where control groups are delegated: they hold the sandbox, and go with it."""
    assert bench.factory.features.groups is not None, "no group is delegated"
    async with bench.open(memory_bytes=128 << 20, num_processes=40) as environment:
        kind = bench.factory.features.groups.name
        assert environment.isolation.memory_limit == f"{kind}+rlimit+watchdog"
        assert environment._scratch is not None
        groups = processes.groups_of(environment._scratch.path)
        assert groups
        assert set(processes.group_members(environment._scratch.path)) >= set(
            environment._tree.payload() if environment._tree is not None else []
        )
        # three of 100 MiB: none is over its own limit, together they are over the group's
        await environment.put("/tmp/eat.py", (
            b"import time\nx = bytearray(100 << 20)\n"
            b"for i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(600)\n"
        ))  # fmt: skip
        eat = "python3 /tmp/eat.py"
        result = await environment.run(f"{eat} & {eat} & {eat} & wait", PATIENCE_SECONDS)
        assert result.stopped_for is Stop.memory, result
        await settled(environment)
        many = "i=0; while [ $i -lt 400 ]; do sleep 600 & i=$((i+1)); done 2>&1; wait"
        crowd = await environment.run(many, 60.0)
        assert crowd.stopped_for is Stop.processes or b"fork" in crowd.output.lower(), crowd
        await settled(environment)
    assert not any(group.exists() for group in groups)
    bench.assert_nothing_left()


ALL = CHECKS | ISOLATING | DESTRUCTIVE


def run_check(function: Check, *, backend: Backend, image: Path | None, root: Path) -> None:
    """Runs one check with a factory of its own."""

    async def inside() -> None:
        bench = Bench(backend, image, root)
        try:
            await function(bench)
        finally:
            bench.factory.close()
        assert list(bench.scratch.iterdir()) == []

    asyncio.run(inside())


def main(arguments: list[str]) -> None:
    backend, image, name, *rest = arguments
    chosen = Backend(backend), None if image == "-" else Path(image)
    if name == "worker":
        run_check(be_a_worker, backend=chosen[0], image=chosen[1], root=Path(rest[0]))
        return
    if os.geteuid() == 0 and name in DESTRUCTIVE:
        sys.exit(f"{name} is destructive: run it as an ordinary user")
    with tempfile.TemporaryDirectory(prefix="prorl-check-", dir="/var/tmp") as root:
        known = ALL | APPTAINER | {"the_kernel_limits_it": the_kernel_limits_it}
        run_check(known[name], backend=chosen[0], image=chosen[1], root=Path(root))


if __name__ == "__main__":
    main(sys.argv[1:])
