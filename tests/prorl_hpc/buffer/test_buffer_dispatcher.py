"""The dispatcher alone: leases, deadlines, failures, and its properties under chaos."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_hpc.buffer.dispatcher import Admission, Dispatcher
from prorl_hpc.buffer.manifest import Closed, Dropped, Shard
from prorl_hpc.buffer.messages import Claim, GroupIds
from prorl_hpc.records import Lease, Outcome
from tests.prorl_hpc.buffer.buffer_helpers import make_config, make_trajectory
from tests.prorl_hpc.buffer.dispatcher_helpers import Disk, announce, make


def test_nothing_is_leased_before_the_learner_says_where_it_stands() -> None:
    d, _ = make()
    assert d.lease("w0", capacity=100, now=0.0) == []
    announce(d)
    leases = d.lease("w0", capacity=100, now=0.0)
    assert [x.group_id for x in leases] == [0, 1, 2, 3]
    assert d.lease("w0", capacity=100, now=0.0) == []


def test_a_group_is_split_only_over_nodes_that_are_too_small() -> None:
    d, _ = make()
    announce(d)
    assert [(x.group_id, x.rollouts) for x in d.lease("w0", capacity=6, now=0.0)] == [
        (0, (0, 1, 2, 3))
    ]
    assert [(x.group_id, x.rollouts) for x in d.lease("w1", capacity=3, now=0.0)] == [
        (1, (0, 1, 2))
    ]
    assert [(x.group_id, x.rollouts) for x in d.lease("w2", capacity=9, now=0.0)] == [
        (1, (3,)),
        (2, (0, 1, 2, 3)),
        (3, (0, 1, 2, 3)),
    ]


def test_only_missing_rollouts_are_leased_again_and_to_another_worker() -> None:
    d, disk = make(batch_groups=1, max_staleness=0)
    announce(d)
    lease = d.lease("w0", capacity=4, now=0.0)[0]
    for rollout in (0, 2):
        assert d.admit(make_trajectory(0, rollout), now=1.0) is Admission.accept
        disk.seal(0, rollout)
    d.heartbeat("w1", (), now=59.0)
    d.tick(61.0)  # w0's lease (60 s) has expired
    d.leases.heard("w0", now=61.0)
    assert d.lease("w0", capacity=4, now=61.0) == []
    again = d.lease("w1", capacity=4, now=61.0)[0]
    assert (again.group_id, again.rollouts, again.seed) == (0, (1, 3), lease.seed)
    claim = Claim(lease_id=lease.lease_id, group_id=0, rollouts=lease.rollouts)
    assert d.heartbeat("w0", [claim], now=62.0) == [lease.lease_id]
    assert disk.push(again, now=62.0) == [Admission.accept] * 2
    assert d.admit(make_trajectory(0, 1), now=63.0) is Admission.duplicate
    assert [ref.group_id for ref in d.take(5)] == [0]


def test_a_node_revives_its_lease_after_a_restart_of_the_buffer() -> None:
    old, disk = make()
    announce(old)
    disk.flush()
    lease = old.lease("w0", capacity=4, now=0.0)[0]
    new = Dispatcher(make_config(), first_lease_id=1 << 32)
    new.restore(disk.lines, now=0.0)
    claim = Claim(lease_id=lease.lease_id, group_id=lease.group_id, rollouts=lease.rollouts)
    assert new.heartbeat("w0", [claim], now=1.0) == []
    leased = new.lease("w1", capacity=100, now=6.0)  # 5 s are for claims
    assert [x.group_id for x in leased] == [1, 2, 3]


def test_deadlines_close_retry_and_drop() -> None:
    d, disk = make(batch_groups=1, max_staleness=0, group_deadline_seconds=100.0, min_usable=2)
    announce(d)
    d.lease("w0", capacity=4, now=0.0)
    d.admit(make_trajectory(0, 3), now=1.0)
    disk.seal(0, 3)
    d.tick(100.0)
    disk.flush()
    assert d.take(1) == []  # one of two usable: a second deadline
    again = d.lease("w1", capacity=4, now=100.0)[0]
    assert again.rollouts == (0, 1, 2)
    d.admit(make_trajectory(0, 0), now=101.0)
    disk.seal(0, 0)
    d.tick(199.0)
    assert d.take(1) == []
    d.tick(200.0)
    disk.flush()
    ref = d.take(1)[0]
    assert len(ref.members) == 2
    assert d.admit(make_trajectory(0, 1), now=201.0) is Admission.late
    assert d.counters["late"] == 1
    # The next group gets nothing at all: dropped, and replaced beyond the batch.
    d.advance(version=1)
    d.lease("w0", capacity=4, now=300.0)
    d.tick(400.0)
    d.tick(500.0)
    disk.flush()
    assert d.dropped == {1}
    assert [x.group_id for x in d.lease("w0", capacity=100, now=500.0)] == [2]


def test_a_straggler_that_survives_a_restart_holds_its_group_no_longer_than_the_deadline() -> None:
    """Its node heartbeats all the time, and claims its lease of the buffer's next attempt."""
    settings_ = {"batch_groups": 1, "max_staleness": 0, "group_deadline_seconds": 100.0}
    old, disk = make(**settings_)
    announce(old)
    lease = old.lease("w0", capacity=4, now=0.0)[0]
    for rollout in (0, 1):
        assert old.admit(make_trajectory(0, rollout), now=1.0) is Admission.accept
        disk.seal(0, rollout)
    new = disk.dispatcher = Dispatcher(make_config(**settings_), first_lease_id=1 << 32)
    new.restore(disk.lines, now=0.0)
    announce(new)
    claim = Claim(lease_id=lease.lease_id, group_id=0, rollouts=(2, 3))
    for now in range(1, 100):
        assert new.heartbeat("w0", [claim], now=float(now)) == []
        new.tick(float(now))
    disk.flush()
    assert new.take(1) == []
    for now in range(100, 130):  # within one more heartbeat or so
        new.heartbeat("w0", [claim], now=float(now))
        new.tick(float(now))
    disk.flush()
    (ref,) = new.take(1)
    assert (ref.group_id, len(ref.members)) == (0, 2)
    assert new.heartbeat("w0", [claim], now=131.0) == [lease.lease_id]
    assert new.admit(make_trajectory(0, 2), now=131.0) is Admission.late


def test_deterministic_mode_pins_versions_and_keeps_the_order() -> None:
    d, disk = make(deterministic=True, max_staleness=0, batch_groups=2)
    announce(d)
    first, second = d.lease("w0", capacity=8, now=0.0)
    assert first.policy_version == second.policy_version == 0
    disk.push(second)
    assert d.take(2) == []
    disk.push(first)
    assert [ref.group_id for ref in d.take(2)] == [0, 1]
    d.advance(filtered=1)
    refill = d.lease("w0", capacity=8, now=0.0)
    assert [(x.group_id, x.policy_version) for x in refill] == [(2, 0)]
    d.advance(version=1)
    assert [x.policy_version for x in d.lease("w0", capacity=8, now=0.0)] == [1, 1]


def test_after_a_roll_back_nothing_of_the_lost_history_is_leased() -> None:
    d, _ = make(deterministic=True, max_staleness=0, batch_groups=2)
    announce(d, version=4, done=8)
    assert [x.group_id for x in d.lease("w0", capacity=4, now=0.0)] == [8]
    announce(d, version=2, done=4)
    d.worker_replaced("w0", now=0.0)
    leases = d.lease("w0", capacity=100, now=0.0)
    assert [(x.group_id) for x in leases] == [4, 5]
    announce(d, version=4, done=8)
    assert [x.group_id for x in d.lease("w0", capacity=100, now=0.0)] == [8, 9]


def test_failures_are_counted_by_what_went_wrong() -> None:
    d, _ = make()
    announce(d)
    d.lease("w0", capacity=4, now=0.0)
    failure = make_trajectory(0, 0, outcome=Outcome.infrastructure_failure)
    for detail in ("no image", "no image", "engine gone"):
        d.admit(replace(failure, detail=detail), now=0.0)
    assert d.failures == {"sums: no image": 2, "sums: engine gone": 1}


def test_names_that_differ_every_time_are_one_kind_of_failure() -> None:
    d, _ = make()
    announce(d)
    d.lease("w0", capacity=4, now=0.0)
    failure = make_trajectory(0, 0, outcome=Outcome.infrastructure_failure)
    for token in ("0123456789ab-ba9876543210", "aaaaaaaaaaaa-bbbbbbbbbbbb"):
        detail = f"init: scratch /local/worker-{token[:12]}/{token} can't be made: No space left"
        d.admit(replace(failure, detail=detail), now=0.0)
    assert d.failures == {"sums: init: scratch /local/worker-*/* can't be made: No space left": 2}


def test_a_lost_shard_reopens_what_is_not_taken() -> None:
    d, disk = make()
    announce(d)
    for lease in d.lease("w0", capacity=100, now=0.0):
        disk.push(lease)
    taken = d.take(2)
    shard = taken[1].members[2][0]
    d.quarantine(shard, reason="test", group_id=taken[1].group_id)
    disk.flush()
    again = d.lease("w0", capacity=100, now=0.0)
    assert [(x.group_id, x.rollouts) for x in again] == [(1, (2,))]
    disk.push(again[0])
    assert [ref.group_id for ref in d.take(9)] == [1, 2, 3]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_group_reaches_the_learner_once_whatever_happens(  # noqa: C901
    data: st.DataObject,
) -> None:
    config = make_config(
        batch_groups=2, max_staleness=1, num_rollouts=2, min_usable=1, lease_seconds=10.0
    )
    d = Dispatcher(config)
    disk = Disk(d)
    announce(d)
    now, version, consumed, checkpoint = 0.0, 0, GroupIds(), (0, GroupIds())
    held: dict[str, list[Lease]] = {"w0": [], "w1": []}
    for _ in range(data.draw(st.integers(10, 60))):
        now += data.draw(st.sampled_from([0.0, 1.0, 11.0]))
        worker = data.draw(st.sampled_from(["w0", "w1"]))
        action = data.draw(
            st.sampled_from(["lease", "push", "push", "lose", "take", "restart", "crash", "save"])
        )
        if action == "lease":
            held[worker] += d.lease(worker, capacity=data.draw(st.integers(1, 5)), now=now)
        elif action == "push" and held[worker]:
            disk.push(held[worker].pop(data.draw(st.integers(0, len(held[worker]) - 1))), now=now)
        elif action == "lose":
            held[worker] = []
        elif action == "take":
            taken = [ref.group_id for ref in d.take(2)]
            assert not any(g in consumed for g in taken)
            consumed = consumed.union(taken)
            version = len(consumed) // 2
            d.advance(version=version)
        elif action == "save":
            checkpoint = (version, consumed)
        elif action == "restart":
            disk.flush()
            d = disk.dispatcher = Dispatcher(config, first_lease_id=(len(disk.lines) + 1) << 32)
            d.restore(disk.lines, now=now)
            d.announce(
                version=version, step=0, filtered=0, consumed=checkpoint[1],
                held=GroupIds.of(g for g in consumed if g not in checkpoint[1]),
            )  # fmt: skip
        elif action == "crash":
            version, consumed = checkpoint
            d.announce(version=version, step=0, filtered=0, consumed=consumed, held=GroupIds())
        d.tick(now)
        disk.flush()
        rows = [row[:2] for line in disk.lines if isinstance(line, Shard) for row in line.rows]
        assert len(rows) == len(set(rows))
        assert max((g for g, _ in rows), default=0) < d.capacity.limit
    # And it can always go on: an honest worker fills what the learner needs.
    for _ in range(40):
        now += 20.0
        d.tick(now)
        for lease in d.lease("w9", capacity=100, now=now):
            disk.push(lease, now=now)
        disk.flush()
        taken = [ref.group_id for ref in d.take(2)]
        assert not any(g in consumed for g in taken)
        consumed = consumed.union(taken)
        version = len(consumed) // 2
        d.advance(version=version)
    assert len(consumed) >= 40
    closed = [x.group for x in disk.lines if isinstance(x, Closed | Dropped)]
    assert len(closed) == len(set(closed))


def test_a_node_gives_leases_back_by_not_claiming_them() -> None:
    d, _ = make(batch_groups=1, max_staleness=0)
    announce(d)
    d.lease("w0", capacity=4, now=0.0)
    assert d.heartbeat("w0", (), now=1.0) == []  # too young: its reply may be on its way
    d.heartbeat("w1", (), now=1.0)
    assert d.lease("w1", capacity=4, now=1.0) == []
    d.heartbeat("w0", (), now=6.0)
    assert [x.rollouts for x in d.lease("w1", capacity=4, now=6.0)] == [(0, 1, 2, 3)]
