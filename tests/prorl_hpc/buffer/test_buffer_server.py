"""The server over real sockets: leases, durable pushes, takes, restarts, fencing."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from prorl_hpc.buffer.client import RolloutClient
from prorl_hpc.buffer.keys import load_server_keys
from prorl_hpc.buffer.messages import (
    FORMAT,
    VALIDATION_BASE,
    Envelope,
    Fenced,
    GroupIds,
    GroupRef,
)
from prorl_hpc.buffer.reader import GroupReader
from prorl_hpc.buffer.server import BufferServer, Ended, ServerConfig
from prorl_hpc.records import Kind, Lease, Outcome
from tests.prorl_hpc.buffer.buffer_helpers import (
    make_config,
    make_run,
    make_trajectory,
    produce,
    serving,
    wait_for,
)


async def fill(client: RolloutClient, *, capacity: int = 64) -> int:
    """Leases and produces until nothing is leased; returns the number of trajectories."""
    made = 0
    while leases := (await client.lease(capacity)).leases:
        for lease in leases:
            results = await client.push(produce(lease))
            assert set(results.values()) == {"stored"}
            made += len(results)
    return made


def ids(refs: list[GroupRef]) -> list[int]:
    return [ref.group_id for ref in refs]


def test_groups_go_from_lease_to_learner(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a run")
    with serving(run) as buffer:
        learner = buffer.learner()

        async def node() -> int:
            client = await buffer.rollout()
            made = await fill(client)
            await client.close()
            return made

        # (max_staleness 1 + version 0 + 1) * 2 groups of 4 rollouts
        assert asyncio.run(node()) == 16
        refs = learner.take(4, timeout_seconds=60)
        assert ids(refs) == [0, 1, 2, 3]
        reader = GroupReader(run)
        group = reader.read(refs[1])
        assert [t.rollout_index for t in group.trajectories] == [0, 1, 2, 3]
        wanted = make_trajectory(1, 2)
        for name in ("tokens", "loss_mask", "logprobs", "versions"):
            assert np.array_equal(getattr(group.trajectories[2], name), getattr(wanted, name))
        assert group.trajectories[2].components == {"correct": 1.0}
        reader.close()
        learner.published(1)
        assert asyncio.run(node()) == 8  # one more batch came within the limit
        wait_for(lambda: learner.status().groups_ready == 2, what="both groups to close")
        learner.finish("all steps are done")
        learner.close()
        buffer.join()
        assert buffer.ended == Ended(finished=True, reason="all steps are done")


def test_restart_gives_the_same_groups_and_leases_only_what_is_missing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")

    async def first() -> None:
        client = await buffer.rollout()
        leases = (await client.lease(64)).leases
        await client.push(produce(leases[0]))
        await client.push(produce(leases[1])[:3])
        await client.close()

    with serving(run) as buffer:
        learner = buffer.learner()
        asyncio.run(first())
        assert ids(learner.take(1, timeout_seconds=60)) == [0]
        learner.close()
    config = make_config(lease_seconds=1.0)
    with serving(run, attempt=2, config=config) as buffer:
        learner = buffer.learner(attempt=2)

        async def second() -> None:
            client = await buffer.rollout("w1")
            leases: tuple[Lease, ...] = ()
            while not leases:  # a moment after the restart belongs to nodes that hold leases
                leases = (await client.lease(64)).leases
            assert {lease.group_id: lease.rollouts for lease in leases} == {
                1: (3,),
                2: (0, 1, 2, 3),
                3: (0, 1, 2, 3),
            }
            assert await client.push([make_trajectory(1, 0)]) == {(1, 0): "duplicate"}
            await client.push(produce(leases[0]))
            await client.close()

        asyncio.run(second())
        # The new attempt's checkpoint knows of no group: 0 is given again.
        refs = learner.take(2, timeout_seconds=60)
        assert ids(refs) == [0, 1]
        reader = GroupReader(run)
        assert len(reader.read(refs[1]).trajectories) == 4
        reader.close()
        learner.close()


def test_learner_survives_a_restart_of_the_buffer_without_repeats(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with serving(run) as buffer:
        learner = buffer.learner()

        async def node() -> None:
            client = await buffer.rollout()
            await fill(client)
            await client.close()

        asyncio.run(node())
        assert ids(learner.take(3, timeout_seconds=60)) == [0, 1, 2]
    with serving(run, attempt=2) as buffer:
        learner._channel._locate = lambda: buffer.address
        assert ids(learner.take(1, timeout_seconds=60)) == [3]
        learner.close()


def test_validation_is_pinned_and_comes_first(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with serving(run) as buffer:
        learner = buffer.learner()
        learner.published(3)
        learner.validate(3, {"sums": 2}, 2)
        assert learner.validation_results(3) is None
        assert learner.validation_progress(3).num_open == 2

        async def node() -> None:
            client = await buffer.rollout()
            leases = (await client.lease(4)).leases
            assert [(x.kind, x.policy_version, x.instance_index) for x in leases] == [
                (Kind.validation, 3, 0),
                (Kind.validation, 3, 1),
            ]
            wrong = make_trajectory(VALIDATION_BASE + (3 << 20), 0, version=2, kind=Kind.validation)
            assert list((await client.push([wrong])).values()) == ["late"]
            for lease in leases:
                await client.push(produce(lease))
            await client.close()

        asyncio.run(node())
        refs = learner.validation_results(3, timeout_seconds=60)
        assert refs is not None
        assert [(ref.kind, len(ref.members)) for ref in refs] == [(Kind.validation, 2)] * 2
        learner.close()


def test_older_attempts_are_fenced(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with serving(run) as buffer:
        old_learner = buffer.learner(attempt=1)
        new_learner = buffer.learner(attempt=2)
        with pytest.raises(Fenced, match="attempt 1"):
            old_learner.published(5)

        async def nodes() -> None:
            old = await buffer.rollout("w0", attempt=1)
            leases = (await old.lease(4)).leases
            new = await buffer.rollout("w0", attempt=2)
            again = (await new.lease(4)).leases
            assert [x.group_id for x in again] == [x.group_id for x in leases]
            assert set((await old.push(produce(leases[0]))).values()) == {"fenced"}
            assert set((await new.push(produce(again[0]))).values()) == {"stored"}
            await old.close()
            await new.close()

        asyncio.run(nodes())
        old_learner.close()
        new_learner.close()


def test_a_replayed_push_changes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with serving(run) as buffer:
        learner = buffer.learner()

        async def node() -> None:
            client = await buffer.rollout()
            lease = (await client.lease(4)).leases[0]
            both = await asyncio.gather(client.push(produce(lease)), client.push(produce(lease)))
            # Whichever is second is answered only when the first is durable.
            assert set(both[0].values()) == {"stored"}
            assert set(both[1].values()) <= {"stored", "duplicate"}
            assert set((await client.push(produce(lease))).values()) == {"duplicate"}
            await client.close()

        asyncio.run(node())
        assert len(learner.take(1, timeout_seconds=60)[0].members) == 4
        assert learner.status().trajectories == 4
        learner.close()


def test_infrastructure_failures_are_retried_then_masked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with serving(run, config=make_config(max_infrastructure_retries=1)) as buffer:
        learner = buffer.learner()

        async def node() -> None:
            client = await buffer.rollout()
            lease = (await client.lease(4)).leases[0]
            await client.push(produce(lease)[1:])
            failure = make_trajectory(lease.group_id, 0, outcome=Outcome.infrastructure_failure)
            assert await client.push([failure]) == {(0, 0): "retry"}
            again = (await client.lease(1)).leases[0]
            assert (again.group_id, again.rollouts) == (0, (0,))
            assert await client.push([failure]) == {(0, 0): "stored"}
            await client.close()

        asyncio.run(node())
        ref = learner.take(1, timeout_seconds=60)[0]
        assert len(ref.members) == 3
        counters = learner.status().counters
        assert (counters["failure/sums"], counters["masked"]) == (2, 1)
        assert learner.status().failures == {"sums: stop": 2}
        learner.close()


def test_a_node_claims_nothing_that_it_has_handed_in(tmp_path: Path) -> None:
    """A rollout that is to be tried again could else be revived for a node that isn't at it."""
    run = make_run(tmp_path / "run")
    config = make_config(max_infrastructure_retries=3)
    with serving(run, config=config) as buffer:
        learner = buffer.learner()

        async def node() -> None:
            client, other = await buffer.rollout(), await buffer.rollout("w1")
            lease = (await client.lease(4)).leases[0]
            failure = make_trajectory(lease.group_id, 0, outcome=Outcome.infrastructure_failure)
            assert await client.push([failure]) == {(0, 0): "retry"}
            # As after a restart: the lease is unknown, and revived by what the node claims.
            buffer.server.service.dispatcher.leases.end(lease.lease_id)
            await client.heartbeat([lease.lease_id])
            again = [x for x in (await other.lease(100)).leases if x.group_id == lease.group_id]
            assert [x.rollouts for x in again] == [(0,)]
            await client.close()
            await other.close()

        asyncio.run(node())
        learner.close()


def test_the_watchdog_names_who_is_missing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with serving(
        run, server=ServerConfig(seal_seconds=0.02, peer_seconds=0.3, goodbye_seconds=0.1)
    ) as buffer:
        buffer.join()
        assert isinstance(buffer.ended, Ended)
        assert buffer.ended.culprit
        assert "no learner ever came" in buffer.ended.reason


def test_clean_stop_tells_nodes_and_learner(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with serving(
        run, server=ServerConfig(seal_seconds=0.02, stop_seconds=60, goodbye_seconds=60)
    ) as buffer:
        learner = buffer.learner()

        async def node() -> None:
            client = await buffer.rollout()
            assert (await client.lease(0)).phase == "running"
            buffer.server.stop("the walltime is near")
            while (await client.lease(0)).phase == "running":
                await asyncio.sleep(0.01)
            await client.close()

        asyncio.run(node())
        assert learner.take(1, timeout_seconds=60) == []
        assert learner.phase == "draining"
        learner.close()
        buffer.join()
        assert buffer.ended == Ended(finished=False, reason="the walltime is near")


def test_a_second_server_fences_the_first(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with serving(run) as old:
        learner = old.learner()

        async def node() -> None:
            late = await old.rollout()
            lease = (await late.lease(4)).leases[0]
            wait_for(lambda: old.server.service.store.idle, what="the first owner's lines")
            with serving(run, attempt=2) as new:
                push = asyncio.create_task(late.push(produce(lease)))
                await asyncio.to_thread(old.join)
                assert not push.done()
                push.cancel()
                other = new.learner(attempt=2)
                assert other.status().trajectories == 0
                other.close()
            await late.close()

        asyncio.run(node())
        assert "taken over" in str(old.ended)
        learner.close()


def test_group_ids() -> None:
    ids_ = GroupIds.of([5, 1, 2, 3]).union(GroupIds(((3, 6),)))
    assert ids_.ranges == ((1, 6),)
    assert ids_.minus([1, 3]).ranges == ((2, 3), (4, 6))
    assert [i in ids_ for i in (0, 1, 5, 6)] == [False, True, True, False]
    assert (len(ids_), list(ids_)) == (5, [1, 2, 3, 4, 5])


def test_a_finished_run_waits_a_moment_for_nodes_that_were_silent(tmp_path: Path) -> None:
    """A node held up for longer than its lease would find nobody, and wait for a successor."""
    now = [0.0]
    run = make_run(tmp_path / "run")
    server = BufferServer(
        run,
        config=make_config(lease_seconds=1.0),
        server=ServerConfig(farewell_seconds=30.0, goodbye_seconds=5.0),
        keys=load_server_keys(run),
        attempt=1,
        now=lambda: now[0],
    )
    server.service.store.start()
    try:
        envelope = Envelope(
            format=FORMAT, run=run.name, worker="w0", attempt=1, session=1, request=1
        )
        peer, _ = server.service.peers.meet("rollout", envelope, now=0.0)
        assert peer is not None
        now[0] = 2.0
        server.service.drain("the walltime is near")
        assert server._may_leave(0.0)  # its successor will tell the node
        server.service.phase = "finished"
        assert not server._may_leave(0.0)
        peer.told_end = True
        assert server._may_leave(0.0)
        peer.told_end = False
        assert server._may_leave(31.0)  # told or not
        now[0] = 31.0
        assert server._may_leave(0.0)  # gone for long
    finally:
        server.close()
