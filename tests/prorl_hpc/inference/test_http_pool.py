"""The pool over servers that come and go; servers are in-process fakes with the same face."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from prorl_hpc.inference import server as server_module
from prorl_hpc.inference.engine import Chunk, Completion, EngineError, Sampling
from prorl_hpc.inference.http import RequestRefused, ServerGone
from prorl_hpc.inference.http_pool import HttpPool
from prorl_hpc.inference.server import LoadFailed, Server
from prorl_hpc.inference.supervise import Fleet, Launch
from prorl_hpc.policy import PolicyManifest, digest_at, publish_directory, verify_policy

SAMPLING = Sampling(temperature=1.0, max_new_tokens=4)
BOUND_SECONDS = 300.0


class FakeServer:
    """Answers with its version; dies, hangs or refuses when told to."""

    def __init__(self, address: str, *, version: int = 0) -> None:
        self.address = address
        self.version = version
        self.alive = True
        self.hold = asyncio.Event()
        self.hold.set()
        self.num_requests = 0
        self.load_error: Exception | None = None
        self.refuses = False
        self.closed = False

    async def generate(self, prompt_ids: tuple[int, ...], *, sampling: Sampling) -> Completion:
        self.num_requests += 1
        if self.refuses:
            raise RequestRefused("too long")
        await self.hold.wait()
        if not self.alive:
            raise ServerGone(f"{self.address} is dead")
        n = sampling.max_new_tokens
        return Completion(
            token_ids=(7,) * n,
            logprobs=(-1.0,) * n,
            versions=(self.version,) * n,
            finish_reason="length",
        )

    async def load(self, version: int, *, path: Path) -> None:
        if self.load_error is not None:
            raise self.load_error
        self.version = version

    async def check(self) -> None:
        if not self.alive:
            raise ServerGone(f"{self.address} is dead")

    async def close(self) -> None:
        self.closed = True


def version_at(path: Path, version: int) -> Path:
    """A published version with the smallest file that is whole: an empty header."""

    def write(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    publish_directory(path, version=version, step=version, write=write)
    return path


def run(test: object) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_SECONDS):
            await test  # type: ignore[misc]

    asyncio.run(bounded())


async def opened(*servers: FakeServer, **more: object) -> HttpPool:
    pool = HttpPool(servers, version=0, **more)  # type: ignore[arg-type]
    await pool.start()
    return pool


async def until(condition: object) -> None:
    while not condition():  # type: ignore[operator]
        await asyncio.sleep(0.005)


def test_a_dead_server_loses_no_request_and_is_reported() -> None:
    async def check() -> None:
        a, b = FakeServer("a"), FakeServer("b")
        lost: list[Server] = []
        pool = await opened(a, b, lost=lost.append)
        for server in (a, b):
            server.hold.clear()
        requests = [asyncio.create_task(pool.generate((1,), sampling=SAMPLING)) for _ in range(8)]
        await until(lambda: a.num_requests + b.num_requests == 8)
        num_on_a = a.num_requests
        a.alive = False
        a.hold.set()
        b.hold.set()
        answers = await asyncio.gather(*requests)
        assert [answer.token_ids for answer in answers] == [(7,) * 4] * 8
        assert pool.num_retries == num_on_a == 4
        assert lost == [a]
        assert pool.servers == ("b",)
        assert pool.num_lost == 1
        await pool.close()
        assert a.closed
        assert b.closed

    run(check())


def test_requests_of_a_server_that_hangs_are_moved_once_it_is_given_up() -> None:
    async def check() -> None:
        a, b = FakeServer("a"), FakeServer("b")
        pool = await opened(a, health_every_seconds=0.01)
        a.hold.clear()
        request = asyncio.create_task(pool.generate((1,), sampling=SAMPLING))
        await until(lambda: a.num_requests == 1)
        a.alive = False  # its health goes, its request hangs for ever
        await until(lambda: pool.num_lost == 1)
        await pool.join(b)
        assert len((await request).token_ids) == 4
        await pool.close()

    run(check())


def test_an_unwell_server_is_drained_and_comes_back() -> None:
    async def check() -> None:
        a, b = FakeServer("a"), FakeServer("b")
        pool = HttpPool((a, b), version=0)
        await pool.start()
        a.alive = False
        await pool._look_at(a)
        assert pool.servers == ("b",)
        a.alive = True
        await pool._look_at(a)
        assert sorted(pool.servers) == ["a", "b"]
        assert pool.num_lost == 0
        await pool.close()

    run(check())


def test_a_refused_request_is_not_tried_elsewhere() -> None:
    async def check() -> None:
        a, b = FakeServer("a"), FakeServer("b")
        a.refuses = b.refuses = True
        pool = await opened(a, b)
        with pytest.raises(RequestRefused, match="too long"):
            await pool.generate((1,), sampling=SAMPLING)
        assert a.num_requests + b.num_requests == 1
        await pool.close()

    run(check())


def test_without_any_server_a_request_waits_and_then_says_so() -> None:
    async def check() -> None:
        pool = await opened(patience_seconds=0.05)
        with pytest.raises(EngineError, match=r"no inference server was well within 0\.05 s"):
            await pool.generate((1,), sampling=SAMPLING)
        waiting = HttpPool(version=0)
        await waiting.start()
        request = asyncio.create_task(waiting.generate((1,), sampling=SAMPLING))
        await asyncio.sleep(0)
        await waiting.join(FakeServer("late"))
        assert len((await request).token_ids) == 4
        await waiting.close()
        await pool.close()

    run(check())


def test_a_new_version_reaches_every_server_and_late_ones(tmp_path: Path) -> None:
    async def check() -> None:
        a, b, late = FakeServer("a"), FakeServer("b"), FakeServer("late")
        pool = await opened(a, b)
        await pool.load(3, path=version_at(tmp_path / "v3", 3))
        await pool.join(late)
        assert (pool.version, a.version, b.version, late.version) == (3, 3, 3, 3)
        await pool.close()

    run(check())


def test_a_server_that_fails_to_load_is_replaced_not_left_behind(tmp_path: Path) -> None:
    async def check() -> None:
        a, b = FakeServer("a"), FakeServer("b")
        lost: list[Server] = []
        pool = await opened(a, b, lost=lost.append)
        a.load_error = LoadFailed("out of memory")
        await pool.load(1, path=version_at(tmp_path / "v1", 1))
        assert lost == [a]
        assert pool.servers == ("b",)
        assert pool.version == 1
        b.load_error = LoadFailed("out of memory")
        with pytest.raises(EngineError, match="no server could load version 2"):
            await pool.load(2, path=version_at(tmp_path / "v2", 2))
        await pool.close()

    run(check())


def test_a_damaged_version_is_refused_before_any_server_hears_of_it(tmp_path: Path) -> None:
    async def check() -> None:
        a = FakeServer("a")
        pool = await opened(a)
        path = version_at(tmp_path / "v1", 1)
        with pytest.raises(EngineError, match="holds version 1, not 2"):
            await pool.load(2, path=path)
        (path / "model.safetensors").write_bytes(b"damaged")
        with pytest.raises(EngineError, match="damaged"):
            await pool.load(1, path=path)
        assert (a.version, pool.version, pool.servers) == (0, 0, ("a",))
        await pool.close()

    run(check())


def test_a_truncated_file_with_a_right_hash_is_refused(tmp_path: Path) -> None:
    async def check() -> None:
        pool = await opened(FakeServer("a"))

        def write(directory: Path) -> None:
            (directory / "model.safetensors").write_bytes((500).to_bytes(8, "little") + b"{}")

        publish_directory(tmp_path / "v1", version=1, step=1, write=write)
        with pytest.raises(EngineError, match="isn't a whole safetensors file"):
            await pool.load(1, path=tmp_path / "v1")
        await pool.close()

    run(check())


def test_cancelling_reaches_the_server_and_frees_its_place() -> None:
    async def check() -> None:
        a = FakeServer("a")
        pool = await opened(a)
        a.hold.clear()
        request = asyncio.create_task(pool.generate((1,), sampling=SAMPLING))
        await until(lambda: a.num_requests == 1)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert pool._balancer.in_flight("a") == 0
        assert not pool._running["a"]
        await pool.close()

    run(check())


class StreamingFake(FakeServer):
    """Streams token by token; breaks off, or hangs, after so many tokens, if that is set."""

    breaks_after: int | None = None
    hangs_after: int | None = None

    async def stream(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        self.num_requests += 1
        self.prompt, self.sampling = prompt_ids, sampling
        for place in range(sampling.max_new_tokens):
            if place == self.hangs_after:
                await asyncio.Event().wait()
            if place == self.breaks_after:
                self.alive = False
                raise ServerGone(f"{self.address} is dead")
            last = place + 1 == sampling.max_new_tokens
            yield Chunk(
                token_ids=(len(prompt_ids) + place,),
                logprobs=(-1.0,),
                versions=(self.version,),
                finish_reason="length" if last else None,
            )


@pytest.mark.parametrize("breaks_after", [0, 2, 4])
def test_a_stream_goes_on_elsewhere_after_what_has_come(breaks_after: int) -> None:
    async def check() -> None:
        a, b = StreamingFake("a"), StreamingFake("b")
        pool = await opened(a, b)
        a.breaks_after = breaks_after
        # The idlest of equals is the first by name.
        chunks = [c async for c in pool.stream((5, 6), sampling=replace(SAMPLING, seed=9))]
        assert [token for c in chunks for token in c.token_ids] == [2, 3, 4, 5]
        assert chunks[-1].finish_reason == "length"
        if breaks_after == 4:  # never reached: four tokens are all
            assert (a.alive, b.num_requests) == (True, 0)
        else:
            assert b.prompt == (5, 6, *range(2, 2 + breaks_after))
            assert b.sampling.max_new_tokens == 4 - breaks_after
            assert (b.sampling.seed == 9) == (breaks_after == 0)
            assert pool.servers == ("b",)
        assert pool._balancer.in_flight("b") == 0
        await pool.close()

    run(check())


def test_a_stream_of_a_server_that_is_given_up_moves_on() -> None:
    async def check() -> None:
        a, b = StreamingFake("a"), StreamingFake("b")
        pool = await opened(a)
        a.hangs_after = 2
        got: list[Chunk] = []

        async def consume() -> None:
            async for chunk in pool.stream((5,), sampling=SAMPLING):
                got.append(chunk)

        task = asyncio.create_task(consume())
        await until(lambda: len(got) == 2)
        await pool.join(b)
        a.alive = False
        pool._lose(a, "hangs")
        await task
        assert [token for c in got for token in c.token_ids] == [1, 2, 3, 4]
        assert b.num_requests == 1
        await pool.close()

    run(check())


def test_closing_a_stream_early_cancels_it_and_frees_its_place() -> None:
    async def check() -> None:
        a = StreamingFake("a")
        pool = await opened(a)
        async with aclosing(pool.stream((5,), sampling=SAMPLING)) as stream:
            async for _ in stream:
                break
        assert pool._balancer.in_flight("a") == 0
        assert not pool._running["a"]
        await pool.close()

    run(check())


def test_a_server_started_from_lost_weights_of_the_same_number_is_moved(tmp_path: Path) -> None:
    async def check() -> None:
        a, late, same = FakeServer("a"), FakeServer("late"), FakeServer("same")
        loads: list[str] = []

        async def load(version: int, *, path: Path) -> None:
            loads.append(path.name)

        late.version = same.version = 1
        late.load = same.load = load  # type: ignore[method-assign]
        pool = await opened(a)
        path = version_at(tmp_path / "v1", 1)
        await pool.load(1, path=path)
        await pool.join(same, digest=digest_at(path))
        assert not loads
        await pool.join(late, digest="of weights that a crash lost")
        assert loads == ["v1"]


def test_a_retired_server_ends_what_it_has_and_no_health_check_takes_it_back() -> None:
    async def check() -> None:
        a, b = FakeServer("a"), FakeServer("b")
        pool = await opened(a)
        a.hold.clear()
        held = asyncio.create_task(pool.generate((1,), sampling=SAMPLING))
        await until(lambda: a.num_requests == 1)
        pool.retire("a")
        pool.retire("unknown")
        assert pool.servers == ()
        a.alive = False
        await pool._look_at(a)
        a.alive = True
        await pool._look_at(a)
        assert pool.servers == ()
        await pool.join(b)
        assert len((await pool.generate((1,), sampling=SAMPLING)).token_ids) == 4
        assert (a.num_requests, b.num_requests) == (1, 1)
        a.hold.set()
        assert len((await held).token_ids) == 4
        assert "a" not in pool._servers
        await until(lambda: a.closed)
        assert (pool.num_lost, pool.num_retries) == (0, 0)
        idle = FakeServer("idle")
        await pool.join(idle)
        pool.retire("idle")
        await until(lambda: idle.closed)
        await pool.close()

    run(check())


def test_a_version_that_vanishes_while_it_is_checked_is_the_engines_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = version_at(tmp_path / "v1", 1)

    def verify(directory: Path) -> PolicyManifest:
        manifest = verify_policy(directory)
        (directory / "model.safetensors").unlink()
        return manifest

    monkeypatch.setattr(server_module, "verify_policy", verify)
    with pytest.raises(EngineError, match=r"model\.safetensors can't be read"):
        server_module.check_version(path, 1)


@pytest.mark.process
def test_a_server_that_can_not_join_is_let_go(tmp_path: Path) -> None:
    async def check() -> None:
        made = FakeServer("http://127.0.0.1:9", version=1)
        made.load_error = LoadFailed("can't go back")
        pool = HttpPool(version=0, path=version_at(tmp_path / "v0", 0))

        def launch(*, slot: int, address: str, identity: str, path: Path) -> Launch:
            command = ("sleep", "600")
            return Launch(command=command, environment={}, address=address, identity=identity)

        async def connect(launch: Launch, version: int) -> Server:
            return made

        fleet = Fleet(
            pool=pool, num_servers=1, make_launch=launch, connect=connect, start_seconds=60.0,
            log_directory=tmp_path / "logs",
        )  # fmt: skip
        with pytest.raises(EngineError, match="can't go back"):
            await fleet.start()
        assert made.closed
        await pool.close()

    run(check())
