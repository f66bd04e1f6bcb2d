"""Checks of the shell and of files, for every backend. Run by `checks`."""

import asyncio
import contextlib
import time
from pathlib import Path

from prorl_hpc.environment import (
    Backend,
    EndReason,
    EnvironmentEnded,
    SandboxStartError,
    Stop,
    TransferError,
)
from tests.prorl_hpc.environment.bench import (
    PATIENCE_SECONDS,
    Bench,
    assert_ended,
    assert_no_transfer,
    check,
    isolating,
    say,
    started,
)


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
