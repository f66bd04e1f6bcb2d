"""A node served by inference jobs: who is missing, lost weights, time that doesn't count."""

import asyncio
import dataclasses
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from hpc.allocation import StopFlag
from hpc.errors import EndpointTimeout
from prorl_hpc.environment.base import EndReason, EnvironmentEnded
from prorl_hpc.inference.announce import TokenError, make_token
from prorl_hpc.inference.engine import EngineError, Sampling
from prorl_hpc.inference.http_pool import HttpPool
from prorl_hpc.inference.prorl_server import ProrlServer
from prorl_hpc.policy import publish_policy
from prorl_hpc.records import Outcome
from prorl_hpc.rollout.serving import open_own, open_served
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.run import Run
from tests.prorl_hpc.inference.serving_helpers import EchoEngine, HttpJob, bounded, jobs, until
from tests.prorl_hpc.rollout.helpers import make_lease, make_pipeline, make_recipe


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "r")
    run.root.mkdir()
    return run


def publish(run: Run, version: int, content: bytes) -> None:
    def write(directory: Path) -> None:
        (directory / "config.json").write_bytes(content)

    publish_policy(run, version=version, step=version, write=write)


def test_a_node_without_servers_says_who_is_missing(run: Run) -> None:
    async def check(stop: StopFlag, peer_seconds: float) -> None:
        recipe = make_recipe()
        recipe.buffer.peer_seconds = peer_seconds
        async with AsyncExitStack() as stack:
            await open_served(stack, run, recipe, version=0, stop=stop)

    with pytest.raises(TokenError, match="inference-token"):
        bounded(check(StopFlag(), 600.0))
    make_token(run)
    with pytest.raises(EndpointTimeout, match=r"for 0\.01 s: its job never started"):
        bounded(check(StopFlag(), 0.01))
    stopped = StopFlag()
    stopped.stop("the walltime is near")
    with pytest.raises(EndpointTimeout, match="has joined: the walltime is near"):
        bounded(check(stopped, 600.0))


def test_a_node_starts_with_the_first_server_and_counts_what_it_sees(run: Run) -> None:
    async def check() -> None:
        async with jobs(HttpJob(run, engine=EchoEngine(3))), AsyncExitStack() as stack:
            serving = await open_served(stack, run, make_recipe(), version=0, stop=StopFlag())
            sampling = Sampling(temperature=1.0, max_new_tokens=1)
            completion = await serving.engine.generate((1,), sampling=sampling)
            assert completion.token_ids == (3,)
            assert serving.metrics() == {"servers": 1, "servers_lost": 0, "server_retries": 0}
            assert serving.missing() == ""

    bounded(check())


def test_a_rollout_over_weights_that_were_lost_is_sampled_again(run: Run) -> None:
    async def check() -> None:
        publish(run, 1, b"{}")
        async with jobs(HttpJob(run)), AsyncExitStack() as stack:
            serving = await open_served(stack, run, make_recipe(), version=1, stop=StopFlag())
            async with serving.versions.held(1), serving.versions.held(None):
                pass
            with pytest.raises(EngineError, match="published again with other weights"):
                async with serving.versions.held(1):
                    publish(run, 1, b'{"other": 1}')

    bounded(check())


def test_limits_stand_still_while_none_of_the_nodes_own_servers_is_up(run: Run) -> None:
    async def check() -> None:
        pool = HttpPool(version=0)
        server = ProrlServer("http://127.0.0.1:9", version=0)
        engine = EchoEngine()
        engine.pool = pool  # type: ignore[attr-defined]
        async with AsyncExitStack() as stack:
            serving = open_own(stack, engine, Versions(engine, run=run))
            await until(lambda: serving.limits.paused)
            await pool.join(server)
            await until(lambda: not serving.limits.paused)
            await pool.leave(server.address)
            await until(lambda: serving.limits.paused)
        assert not serving.limits.paused
        await pool.close()
        async with AsyncExitStack() as stack:  # an engine in this process can't be away
            assert not open_own(stack, EchoEngine(), Versions(engine, run=run)).limits.paused

    bounded(check())


@pytest.mark.parametrize("paused", [True, False])
def test_time_without_a_server_is_not_the_agents(run: Run, *, paused: bool) -> None:
    """An environment that idled to its end while nobody could serve is no agent's timeout."""

    async def check() -> None:
        pipeline = make_pipeline(EchoEngine(), run=run)
        limits = pipeline._parts.limits

        class Idler:
            needs_environment = False

            async def run(self, conversation: Any, *, messages: Any, **_: Any) -> None:
                conversation.begin(messages)
                await conversation.answer()
                if paused:
                    limits.pause()
                    await asyncio.sleep(0.01)
                    limits.resume()
                raise EnvironmentEnded(EndReason.idle, "nothing ran for 60 s")

        agents = {"sums": Idler()}
        pipeline._parts = dataclasses.replace(pipeline._parts, agents=agents)
        trajectory = await pipeline.produce(make_lease(), 0)
        if paused:
            assert trajectory.outcome is Outcome.infrastructure_failure
            assert trajectory.reward is None
            assert "nobody served the policy meanwhile" in trajectory.detail
        else:
            assert trajectory.outcome is Outcome.agent_timeout

    bounded(check())
