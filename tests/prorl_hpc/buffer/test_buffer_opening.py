"""Which groups the dispatcher opens: mixture, capacity, curriculum, stages."""

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_hpc.buffer.capacity import Capacity
from prorl_hpc.buffer.config import Stage
from prorl_hpc.buffer.dispatcher import Admission, Dispatcher
from prorl_hpc.buffer.manifest import Chosen, Limit
from prorl_hpc.buffer.mixture import Mixture, TaskShare, permuted
from prorl_hpc.choices import CurriculumKind
from tests.prorl_hpc.buffer.buffer_helpers import make_config, produce
from tests.prorl_hpc.buffer.dispatcher_helpers import announce, make


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


def test_stages_change_rollouts_and_context_of_new_groups() -> None:
    d, _ = make(stages=(Stage(from_version=1, num_rollouts=6, context_tokens=99),))
    announce(d)
    assert {x.num_rollouts for x in d.lease("w0", capacity=100, now=0.0)} == {4}
    d.advance(version=1)
    staged = d.lease("w0", capacity=100, now=0.0)
    assert [(len(x.rollouts), x.context_tokens) for x in staged] == [(6, 99)] * 2
