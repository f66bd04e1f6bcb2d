"""Checks of what separates a sandbox from its host, and of what is left behind. Run by `checks`."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from hpc.container_probe import probe
from hpc.errors import IsolationError
from hpc.isolation import Feature
from prorl_hpc.environment import (
    Backend,
    EnvironmentFactory,
    processes,
)
from tests.prorl_hpc.environment.bench import (
    PATIENCE_SECONDS,
    Bench,
    apptainer,
    check,
    holders,
    isolating,
    say,
    until,
)


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
    script = str(Path(__file__).resolve().with_name("checks.py"))
    argv = [sys.executable, "-B", script, bench.backend.value, str(bench.image or "-"), "worker",
            str(root)]  # fmt: skip
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
