"""Reset controller: every trigger, its reason, distances, roll-back, and a resume in between."""

import itertools
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc.errors import HpcError, UserError
from prorl_hpc.learner.reset import (
    Observation,
    ResetDecision,
    ResetState,
    Trigger,
    advance,
    state_from_json,
    state_to_json,
)
from prorl_hpc.recipe import ResetConfig

# A loaded machine is slow, never wrong.
REPEATABLE = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow],
}


def walk(config: ResetConfig, observations) -> list[ResetDecision]:
    state, decisions = ResetState(), []
    for item in observations:
        state, decision = advance(state, item, config=config)
        decisions.append(decision)
    return decisions


def scores(*values: float, every: int = 10) -> list[Observation]:
    return [
        Observation(step=(i + 1) * every, validation_score=value) for i, value in enumerate(values)
    ]


def resets(decisions: list[ResetDecision]) -> list[tuple[int, Trigger]]:
    return [(item.step, item.trigger) for item in decisions if item.reset]


def test_schedule() -> None:
    config = ResetConfig(every_steps=25, reset_optimizer=False)
    decisions = walk(config, [Observation(step=step) for step in range(1, 80)])
    assert resets(decisions) == [
        (25, Trigger.schedule),
        (50, Trigger.schedule),
        (75, Trigger.schedule),
    ]
    assert [item.reset_index for item in decisions if item.reset] == [1, 2, 3]
    assert not any(item.reset_optimizer for item in decisions)
    assert decisions[24].reason == "25 steps since the last reset, every_steps=25"
    assert decisions[0].reason == "nothing is due"


def test_stall_counts_validations_without_a_new_best_since_the_reset() -> None:
    config = ResetConfig(stall_validations=2)
    decisions = walk(config, scores(0.1, 0.2, 0.2, 0.15, 0.15, 0.15, 0.15, 0.16))
    # Best 0.2 at 20; 30 and 40 without a new one. Then the count begins anew: best 0.15 at 50.
    assert resets(decisions) == [(40, Trigger.stall), (70, Trigger.stall)]
    assert decisions[3].reason == "2 validations without a new best, stall_validations=2"
    assert decisions[3].reset_optimizer


def test_degradation_against_the_best() -> None:
    decisions = walk(ResetConfig(degradation=0.05), scores(0.5, 0.46, 0.44, 0.44))
    # 0.04 below is allowed, 0.06 is not; after the reset 0.44 is the new yardstick.
    assert resets(decisions) == [(30, Trigger.degradation)]
    assert "0.44 is 0.06 below its best 0.5" in decisions[2].reason


def test_kl_spike_and_minimum_distance() -> None:
    config = ResetConfig(kl_spike=0.5, min_distance_steps=10)
    decisions = walk(
        config, [Observation(step=step, kl=0.9 if step >= 3 else 0.1) for step in range(1, 15)]
    )
    assert resets(decisions) == [(3, Trigger.kl_spike), (13, Trigger.kl_spike)]
    assert decisions[4].reason == (
        "held back: KL 0.9 exceeds kl_spike=0.5; 2 steps since the last reset, "
        "min_distance_steps=10"
    )


def test_infinite_kl_is_a_spike_and_nan_is_not() -> None:
    config = ResetConfig(kl_spike=0.5)
    assert resets(walk(config, [Observation(step=1, kl=math.inf)])) == [(1, Trigger.kl_spike)]
    assert resets(walk(config, [Observation(step=1, kl=math.nan)])) == []


def test_manual_request_is_obeyed_once_and_at_any_distance() -> None:
    config = ResetConfig(every_steps=4, min_distance_steps=100)
    decisions = walk(
        config,
        [
            Observation(step=4),
            Observation(step=5, manual_request="a"),
            Observation(step=6, manual_request="a"),
            Observation(step=7, manual_request="b"),
        ],
    )
    assert resets(decisions) == [(4, Trigger.schedule), (5, Trigger.manual), (7, Trigger.manual)]
    assert decisions[1].reason == "requested by the user (a)"


def test_roll_back_goes_to_the_best_of_the_whole_run() -> None:
    config = ResetConfig(stall_validations=1, roll_back=True, min_distance_steps=0)
    decisions = walk(config, scores(0.5, 0.4, 0.3, 0.2))
    assert [item.roll_back_step for item in decisions if item.reset] == [10, 10]
    # Without validation, or at the best itself, there is nowhere to go.
    scheduled = ResetConfig(every_steps=1, roll_back=True)
    assert walk(scheduled, [Observation(step=1)])[0].roll_back_step is None
    assert walk(scheduled, scores(0.5, every=1))[0].roll_back_step is None


def test_non_finite_validation_is_ignored() -> None:
    config = ResetConfig(stall_validations=1, degradation=0.1)
    assert resets(walk(config, scores(0.5, math.nan, -math.inf, 0.6))) == []


def test_nothing_configured_never_resets() -> None:
    config = ResetConfig()
    seen = [Observation(step=s, validation_score=1 / s, kl=100.0) for s in range(1, 50)]
    assert resets(walk(config, seen)) == []


def test_steps_never_go_back() -> None:
    with pytest.raises(UserError, match="step=3 after step 4"):
        walk(ResetConfig(), [Observation(step=4), Observation(step=3)])


observed = st.builds(
    lambda score, kl, manual: (score, kl, manual),
    st.none() | st.sampled_from([0.1, 0.2, 0.3, 0.4, math.nan]),
    st.none() | st.sampled_from([0.0, 0.2, 0.9, math.inf, math.nan]),
    st.none() | st.sampled_from(["a", "b"]),
)


@settings(max_examples=60, **REPEATABLE)
@given(items=st.lists(observed, max_size=40), cut=st.integers(0, 40))
def test_a_resumed_controller_decides_as_an_uninterrupted_one(items, cut: int) -> None:
    config = ResetConfig(
        every_steps=9, stall_validations=3, degradation=0.15, kl_spike=0.5, min_distance_steps=3
    )
    observations = [
        Observation(step=i + 1, validation_score=score, kl=kl, manual_request=manual)
        for i, (score, kl, manual) in enumerate(items)
    ]
    state, decisions = ResetState(), []
    for number, item in enumerate(observations):
        if number == cut:
            state = state_from_json(json.loads(json.dumps(state_to_json(state))))
        state, decision = advance(state, item, config=config)
        decisions.append(decision)
    assert decisions == walk(config, observations)
    assert all(item.reason for item in decisions)
    automatic = [item.step for item in decisions if item.reset]
    manual = {item.step for item in decisions if item.trigger is Trigger.manual}
    gaps = itertools.pairwise(automatic)
    assert all(later - earlier >= 3 or later in manual for earlier, later in gaps)


def test_newer_and_damaged_states_are_refused() -> None:
    good = state_to_json(ResetState())
    assert state_from_json(good) == ResetState()
    with pytest.raises(HpcError, match="format=2, this version reads up to 1"):
        state_from_json({**good, "format": 2})
    with pytest.raises(HpcError, match="format=None"):
        state_from_json({})
    with pytest.raises(HpcError, match="damaged"):
        state_from_json({**good, "surprise": 1})
