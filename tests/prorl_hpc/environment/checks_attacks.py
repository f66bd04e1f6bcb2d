"""Checks that attack their own sandbox: only inside one, as an ordinary user. Run by `checks`."""

import contextlib

from prorl_hpc.environment import (
    EndReason,
    Stop,
    TransferError,
    processes,
)
from tests.prorl_hpc.environment.bench import (
    PATIENCE_SECONDS,
    Bench,
    assert_ended,
    destructive,
    say,
    settled,
)


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
