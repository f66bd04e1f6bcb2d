"""The dispatcher alone: mixture, capacity, leases, deadlines, and its properties under chaos."""

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_hpc.buffer.capacity import Capacity
from prorl_hpc.buffer.config import Stage
from prorl_hpc.buffer.dispatcher import Admission, Dispatcher
from prorl_hpc.buffer.manifest import Chosen, Closed, Dropped, Limit, Line, Shard
from prorl_hpc.buffer.messages import VALIDATION_BASE, Claim, GroupIds
from prorl_hpc.buffer.mixture import Mixture, TaskShare, permuted
from prorl_hpc.choices import CurriculumKind
from prorl_hpc.records import Kind, Lease, Outcome
from tests.prorl_hpc.buffer.buffer_helpers import make_config, make_trajectory, produce


class Disk:
    """Makes everything durable at once, in a manifest of its own."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.lines: list[Line] = []

    def push(self, lease: Lease, *, now: float = 0.0) -> list[Admission]:
        answers = []
        for t in produce(lease):
            answers.append(self.dispatcher.admit(t, now=now))
            if answers[-1] is Admission.accept:
                self.seal(t.group_id, t.rollout_index)
        return answers

    def seal(self, group_id: int, rollout: int) -> None:
        number = len(self.lines) + 1
        row = (group_id, rollout, True)
        self.lines.append(Shard(number=number, num_bytes=1, rows=(row,)))
        self.dispatcher.stored(group_id, rollout, location=(number, 0), usable=True)
        self.flush()

    def flush(self) -> None:
        for line in self.dispatcher.drain_lines():
            self.lines.append(line)
            self.dispatcher.recorded(line)
        if self.dispatcher._lines:
            self.flush()


def make(**changes: object) -> tuple[Dispatcher, Disk]:
    dispatcher = Dispatcher(make_config(**changes))
    return dispatcher, Disk(dispatcher)


def announce(d: Dispatcher, *, version: int = 0, filtered: int = 0, done: int = 0) -> None:
    d.announce(
        version=version,
        step=version,
        filtered=filtered,
        consumed=GroupIds(((0, done),) if done else ()),
        held=GroupIds(),
    )


@given(size=st.integers(1, 300), key=st.text(max_size=5))
def test_permuted_is_a_permutation(size: int, key: str) -> None:
    assert sorted(permuted(i, size=size, key=key) for i in range(size)) == list(range(size))


@given(weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=5), seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_mixture_keeps_weights_and_epochs(weights: list[float], seed: int) -> None:
    tasks = {f"t{i}": TaskShare(weight=w, train_size=7) for i, w in enumerate(weights)}
    mixture = Mixture(tasks, seed=seed)
    picks = [mixture.pick(g) for g in range(400)]
    again = Mixture(tasks, seed=seed)
    assert [again.pick(g) for g in reversed(range(400))] == picks[::-1]
    counts = Counter(task for task, _ in picks)
    for i, weight in enumerate(weights):
        # No task is ever more than one group per task away from its exact share.
        assert abs(counts[f"t{i}"] - 400 * weight / sum(weights)) <= len(weights)
        order = [index for task, index in picks if task == f"t{i}"]
        for start in range(0, len(order) - 6, 7):
            assert sorted(order[start : start + 7]) == list(range(7))


def test_capacity_follows_version_filtered_and_dropped() -> None:
    capacity = Capacity(batch_groups=10, max_staleness=2)
    assert capacity.grow(version=0, filtered=0) == Limit(limit=30, version=0)  # (2 + 0 + 1) * 10
    assert capacity.grow(version=0, filtered=3) == Limit(limit=33, version=0)
    capacity.num_dropped = 1
    assert capacity.grow(version=1, filtered=3) == Limit(limit=44, version=1)
    assert capacity.grow(version=0, filtered=0) is None  # roll-back: (2 + 0 + 1) * 10 + 1
    assert (capacity.limit, capacity.reach) == (44, 31)
    assert [capacity.version_of(g) for g in (0, 32, 33, 43)] == [0, 0, 1, 1]


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


def test_validation_waits_for_its_policy_and_goes_first() -> None:
    d, disk = make()
    announce(d)
    d.validate(version=1, counts={"sums": 2}, num_rollouts=1)
    assert d.lease("w0", capacity=1, now=0.0)[0].kind is Kind.train
    d.advance(version=1)
    lease, other = d.lease("w0", capacity=2, now=0.0)
    first = VALIDATION_BASE + (1 << 20)
    assert (lease.group_id, lease.kind, lease.policy_version) == (first, Kind.validation, 1)
    disk.push(other)
    half = d.validation_results(1)
    assert half.groups is None
    assert ([ref.group_id for ref in half.closed], half.num_open) == ([first + 1], 1)
    disk.push(lease)
    whole = d.validation_results(1)
    assert whole.groups is not None
    assert ([ref.group_id for ref in whole.groups], whole.num_dropped) == ([first, first + 1], 0)
    assert d.take(9) == []


def test_a_validation_that_nobody_makes_ends_and_says_what_is_missing() -> None:
    d, disk = make(group_deadline_seconds=100.0)
    announce(d)
    d.validate(version=0, counts={"sums": 3}, num_rollouts=1)
    d.tick(500.0)  # without nodes nothing is given up: the watchdog ends such a run
    lease = d.lease("w0", capacity=1, now=500.0)[0]
    assert lease.kind is Kind.validation
    disk.push(lease, now=501.0)
    d.tick(510.0)
    d.leases.heard("w0", now=610.0)
    d.tick(611.0)  # a second deadline for what nobody took ...
    disk.flush()
    assert d.validation_results(0).num_open == 2
    d.tick(711.0)  # ... and the end
    disk.flush()
    found = d.validation_results(0)
    assert found.groups is not None
    assert ([ref.group_id for ref in found.groups], found.num_dropped) == ([VALIDATION_BASE], 2)


def test_a_newer_validation_ends_the_older_ones_work() -> None:
    d, disk = make()
    announce(d)
    d.validate(version=0, counts={"sums": 3}, num_rollouts=1)
    held, other = d.lease("w0", capacity=2, now=0.0)
    disk.push(other)
    d.advance(version=2)
    d.validate(version=2, counts={"sums": 1}, num_rollouts=1)
    disk.flush()
    # The node that is at work on it hears of it, and what it pushes still is too late.
    claim = Claim(lease_id=held.lease_id, group_id=held.group_id, rollouts=held.rollouts)
    assert d.heartbeat("w0", [claim], now=1.0) == [held.lease_id]
    assert disk.push(held) == [Admission.late]
    lease = d.lease("w0", capacity=1, now=1.0)[0]
    assert (lease.kind, lease.policy_version) == (Kind.validation, 2)
    old = d.validation_results(0)
    assert old.groups is not None
    assert ([ref.group_id for ref in old.groups], old.num_dropped) == ([VALIDATION_BASE + 1], 2)
    assert d.lease("w0", capacity=1, now=1.0)[0].kind is Kind.train


def test_a_superseded_validation_is_taken_up_again_when_a_resumed_learner_asks() -> None:
    d, disk = make()
    announce(d)
    d.validate(version=0, counts={"sums": 2}, num_rollouts=1)
    disk.push(d.lease("w0", capacity=1, now=0.0)[0])
    d.validate(version=1, counts={"sums": 1}, num_rollouts=1)
    disk.flush()
    for restart in (False, True):
        if restart:
            d = Dispatcher(d.config)
            d.restore(disk.lines, now=0.0)
            disk.dispatcher = d
            announce(d)
        d.validate(version=0, counts={"sums": 2}, num_rollouts=1)
        assert d.validation_results(0).num_open == 1
    (lease,) = d.lease("w0", capacity=1, now=20.0)
    assert lease.group_id == VALIDATION_BASE + 1
    disk.push(lease, now=20.0)
    found = d.validation_results(0)
    assert found.groups is not None
    assert (len(found.groups), found.num_dropped) == (2, 0)
    again = Dispatcher(d.config)
    again.restore(disk.lines, now=0.0)
    assert again.validation_results(0).groups == found.groups


def test_the_curriculum_passes_over_what_teaches_nothing_and_remembers_it() -> None:
    config: dict[str, object] = {
        "tasks": {"sums": TaskShare(weight=1.0, train_size=6)},
        "curriculum": CurriculumKind.solve_rate,
        "deterministic": True,
        "max_staleness": 0,
        "batch_groups": 6,
    }
    d, disk = make(**config)
    announce(d)
    first = d.lease("w0", capacity=100, now=0.0)
    assert sorted(x.instance_index for x in first) == list(range(6))
    for lease in first:  # of instances 0, 1 and 2 nothing is solved, of the others one half
        for t in produce(lease):
            t = replace(t, reward=0.0 if lease.instance_index < 3 else t.reward)
            assert d.admit(t, now=0.0) is Admission.accept
            disk.seal(t.group_id, t.rollout_index)
    assert len(d.take(6)) == 6
    d.advance(version=1)
    second = d.lease("w0", capacity=100, now=0.0)
    disk.flush()
    assert d.opening.num_extreme == 3
    mixed = [x.instance_index for x in second if x.instance_index >= 3]
    assert len(mixed) > 3  # three without the curriculum
    # Another attempt of the buffer leases the same, from the record or from the results alone.
    for lines in (disk.lines, [x for x in disk.lines if not isinstance(x, Chosen)]):
        again = Dispatcher(make_config(**config), first_lease_id=1 << 32)
        again.restore(lines, now=0.0)
        announce(again, version=1, done=6)
        leases = again.lease("w1", capacity=100, now=60.0)
        assert [(x.group_id, x.instance_index) for x in leases] == [
            (x.group_id, x.instance_index) for x in second
        ]
    wrong = replace(produce(second[0], version=1)[0], instance_id="first")
    other = replace(produce(second[0], version=1)[1], instance_id="another")
    assert d.admit(wrong, now=0.0) is Admission.accept
    assert d.admit(other, now=0.0) is Admission.late


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


def test_stages_change_rollouts_and_context_of_new_groups() -> None:
    d, _ = make(stages=(Stage(from_version=1, num_rollouts=6, context_tokens=99),))
    announce(d)
    assert {x.num_rollouts for x in d.lease("w0", capacity=100, now=0.0)} == {4}
    d.advance(version=1)
    staged = d.lease("w0", capacity=100, now=0.0)
    assert [(len(x.rollouts), x.context_tokens) for x in staged] == [(6, 99)] * 2


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
