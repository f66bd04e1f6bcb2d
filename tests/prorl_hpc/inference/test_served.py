"""A rollout node's engine over inference jobs that come and go, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hpc import ledger
from prorl_hpc.inference.announce import Announcement, Board, load_token, make_token, withdraw
from prorl_hpc.inference.engine import Sampling
from prorl_hpc.inference.served import ServedEngine, ServedOptions
from prorl_hpc.rollout.limits import TimeLimits
from prorl_hpc.run import Run
from tests.prorl_hpc.inference.serving_helpers import EchoEngine, HttpJob, bounded, jobs, until

SAMPLING = Sampling(temperature=1.0, max_new_tokens=2)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "r")
    run.root.mkdir()
    make_token(run)
    return run


@asynccontextmanager
async def node(run: Run, *, clock: object = None, **options: object) -> AsyncIterator[ServedEngine]:
    values = {"request_seconds": 120.0, "missing_seconds": 600.0, "look_seconds": 0.01}
    more = {} if clock is None else {"clock": clock}
    engine = ServedEngine(
        run,
        token=load_token(run),
        version=0,
        limits=TimeLimits(),
        options=ServedOptions(**(values | options)),  # type: ignore[arg-type]
        board=Board(run),
        **more,  # type: ignore[arg-type]
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def test_servers_join_leave_and_are_lost_without_losing_a_request(run: Run) -> None:
    async def check() -> None:
        first, second = (
            HttpJob(run, index=0, engine=EchoEngine(1)),
            HttpJob(run, index=1, engine=EchoEngine(2)),
        )
        async with node(run) as engine, jobs(first):
            await until(lambda: engine.pool.servers)
            first.engine.hold.clear()
            held = [asyncio.create_task(engine.generate((1,), sampling=SAMPLING)) for _ in range(6)]
            await until(lambda: first.engine.running == 6)
            await first.kill()  # no other server is there yet
            await until(lambda: not engine.pool.servers)
            assert not any(task.done() for task in held)
            async with jobs(second):
                answers = await asyncio.gather(*held)
                assert {answer.token_ids for answer in answers} == {(2, 2)}
                assert engine.pool.num_retries == 6
                assert engine.pool.num_lost == 1

    bounded(check())


def test_a_withdrawn_server_ends_what_it_has_and_gets_nothing_more(run: Run) -> None:
    async def check() -> None:
        one, two = (HttpJob(run, index=i, engine=EchoEngine(i)) for i in (0, 1))
        async with node(run) as engine, jobs(one):
            await until(lambda: engine.pool.servers)
            one.engine.hold.clear()
            held = asyncio.create_task(engine.generate((1,), sampling=SAMPLING))
            await until(lambda: one.engine.running == 1)
            withdraw(run, index=0, identity=one.gateway.identity)
            one.gateway.draining = True
            await until(lambda: not engine.pool.servers)
            waiting = asyncio.create_task(engine.generate((1,), sampling=SAMPLING))
            async with jobs(two):
                assert (await waiting).token_ids == (1, 1)
                one.engine.hold.set()
                assert (await held).token_ids == (0, 0)
                assert (engine.pool.num_retries, engine.pool.num_lost) == (0, 0)

    bounded(check())


def test_the_refusal_of_a_draining_server_costs_no_request_its_attempts(run: Run) -> None:
    """It is still announced, and the only one: requests wait for another instead of failing."""

    async def check() -> None:
        one, two = (HttpJob(run, index=i, engine=EchoEngine(i)) for i in (0, 1))
        async with node(run) as engine, jobs(one):
            await until(lambda: engine.pool.servers)
            one.gateway.draining = True
            waiting = asyncio.create_task(engine.generate((1,), sampling=SAMPLING))
            await until(lambda: not engine.pool.servers)
            assert not waiting.done()
            async with jobs(two):
                assert (await waiting).token_ids == (1, 1)

    bounded(check())


def test_a_successor_at_another_port_takes_over(run: Run) -> None:
    async def check() -> None:
        old, new = (HttpJob(run, index=0, engine=EchoEngine(n)) for n in (1, 2))
        async with node(run) as engine, jobs(old):
            await until(lambda: engine.pool.servers)
            await new.start(attempt=2)
            await until(lambda: engine.pool.servers == (f"http://127.0.0.1:{new.port}",))
            assert (await engine.generate((1,), sampling=SAMPLING)).token_ids == (2, 2)
            await new.kill()

    bounded(check())


def test_a_dead_servers_announcement_does_not_take_its_successor_at_the_same_port_along(
    run: Run,
) -> None:
    async def check() -> None:
        job = HttpJob(run, index=0, engine=EchoEngine(4))
        async with node(run) as engine, jobs(job):
            first = job.gateway.identity
            await until(lambda: first in engine._joined)
            job.index, job.gateway.identity = 1, "successor"  # another process at this port
            job.announce()
            await until(lambda: "successor" in engine._joined)
            looks = 0
            look = engine._board.look

            def counted() -> list[Announcement]:
                nonlocal looks
                looks += 1
                return look()

            withdraw(run, index=0, identity=first)
            engine._board.look = counted  # type: ignore[method-assign]
            await until(lambda: looks >= 3)
            assert engine.pool.servers == (f"http://127.0.0.1:{job.port}",)
            assert (await engine.generate((1,), sampling=SAMPLING)).token_ids == (4, 4)

    bounded(check())


def test_an_answer_as_a_stream_is_one_chunk(run: Run) -> None:
    async def check() -> None:
        async with node(run) as engine, jobs(HttpJob(run, engine=EchoEngine(5))):
            await until(lambda: engine.pool.servers)
            stream = engine.stream((1,), sampling=SAMPLING, affinity="talk")
            chunks = [chunk async for chunk in stream]
            assert [token for chunk in chunks for token in chunk.token_ids] == [5, 5]
            assert chunks[-1].finish_reason == "length"

    bounded(check())


def test_announcements_of_the_dead_are_not_taken_in(run: Run) -> None:
    async def check() -> None:
        dead, well = (HttpJob(run, index=i, engine=EchoEngine(i)) for i in (0, 1))
        await dead.start()
        await dead.kill()
        async with node(run) as engine, jobs(well):
            await until(lambda: engine.pool.servers)
            assert engine.pool.servers == (f"http://127.0.0.1:{well.port}",)
            await until(lambda: dead.gateway.identity in engine._pauses)
            assert (await engine.generate((1,), sampling=SAMPLING)).token_ids == (1, 1)

    bounded(check())


def test_without_servers_limits_stand_still_and_the_culprit_is_named(run: Run) -> None:
    async def check() -> None:
        now = [0.0]
        async with node(run, clock=lambda: now[0]) as engine:
            limits = engine._limits
            assert limits.paused
            now[0] = 599.0
            assert engine.missing == ""
            assert engine.note == "no inference server for 599 s"
            now[0] = 600.0
            assert "no inference server for 600 s: its job never started" in engine.missing
            ledger.append(
                run.ledger,
                entry=ledger.Start(
                    time=1.0, job="inference", role="inference", index=0, attempt=3, job_id="1",
                    host="n7",
                ),
            )  # fmt: skip
            assert "its attempt 3 on n7 hasn't published one" in engine.missing
            job = HttpJob(run)
            async with jobs(job):
                await until(lambda: engine.pool.servers)
                assert not limits.paused
                assert (engine.missing, engine.note) == ("", "")
                await job.kill()
                request = asyncio.create_task(engine.generate((1,), sampling=SAMPLING))
                await until(lambda: limits.paused)
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)

    bounded(check())


def test_work_of_other_nodes_counts(run: Run) -> None:
    """Two servers; another node keeps one of them busy: this node's requests go to the other."""

    async def check() -> None:
        busy, idle = (HttpJob(run, index=i, engine=EchoEngine(i)) for i in (0, 1))
        async with node(run) as other, jobs(busy):
            await until(lambda: other.pool.servers)
            busy.engine.hold.clear()
            foreign = [
                asyncio.create_task(other.generate((1,), sampling=SAMPLING)) for _ in range(5)
            ]
            await until(lambda: busy.engine.running == 5)
            await other.close()  # it hears no more of new servers; its requests go on elsewhere
            await asyncio.gather(*foreign, return_exceptions=True)
            await until(lambda: busy.gateway.in_flight == 0)
            busy.gateway.in_flight = 5
            async with jobs(idle), node(run) as engine:
                await until(lambda: len(engine.pool.servers) == 2)
                for _ in range(3):
                    assert (await engine.generate((1,), sampling=SAMPLING)).token_ids == (1, 1)

    bounded(check())
