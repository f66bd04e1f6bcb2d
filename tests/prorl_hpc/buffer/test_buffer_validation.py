"""Validation in the dispatcher: pinned to a version, first, ended and taken up again."""

from prorl_hpc.buffer.dispatcher import Admission, Dispatcher
from prorl_hpc.buffer.messages import VALIDATION_BASE, Claim
from prorl_hpc.records import Kind
from tests.prorl_hpc.buffer.dispatcher_helpers import announce, make


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
