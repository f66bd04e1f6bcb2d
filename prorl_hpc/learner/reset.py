"""When the reference policy is reset: a pure state machine over step, validation and KL.

Knows no weights and no files. The train loop calls `advance` after every step (with a validation
score when there is one), carries the state, stores `state_to_json` in its checkpoint and does what
the decision says. Equal observations give equal decisions, so a resumed run decides as the
uninterrupted one would.

ProRL (arXiv 2505.24864, "reference policy reset") resets reference and optimizer when validation
stalls or degrades; v2 resets on a schedule of 200-500 steps or on a KL spike, and keeps the
optimizer. The papers give no thresholds; those are the recipe's.

    observe --> due? --no---------------------------> keep  (reason: nothing is due)
                 |yes
                 manual? --no--> min distance over? --no--> keep  (reason: held back)
                 |yes                 |yes
                 +--------------------+-------------> reset (reason: which trigger, which numbers)
"""

import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from hpc.errors import HpcError
from prorl_hpc.learner.algorithm_error import AlgorithmError
from prorl_hpc.recipe import ResetConfig

FORMAT = 1
"""Format of a serialised state; a reader refuses a newer one."""


class ResetStateError(HpcError, ValueError):
    """A reset state in a checkpoint that can't be read."""


class Trigger(StrEnum):
    """What asked for a reset."""

    none = "none"
    manual = "manual"
    kl_spike = "kl_spike"
    degradation = "degradation"
    stall = "stall"
    schedule = "schedule"


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What the learner knows after one step."""

    step: int
    validation_score: float | None = None
    """Blended validation score of this step; None when none was taken."""
    kl: float | None = None
    """Mean KL(policy || reference) per token of this step; None without a reference."""
    manual_request: str | None = None
    """Identity of a user's request; each one is obeyed once, also over a resume."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetState:
    """Everything the controller remembers."""

    step: int = 0
    num_resets: int = 0
    last_reset_step: int = 0
    best_score: float | None = None
    """Best blended validation of the whole run, and its step: where a roll-back goes."""
    best_step: int | None = None
    era_best_score: float | None = None
    """Best since the last reset: what stall and degradation are measured against."""
    validations_without_best: int = 0
    last_score: float | None = None
    last_manual_request: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetDecision:
    """What to do now, and why."""

    reset: bool
    trigger: Trigger
    reason: str
    step: int
    reset_index: int
    """Number of resets so far, this one included: names the reference."""
    reset_optimizer: bool
    roll_back_step: int | None
    """Step of the checkpoint to load the policy from first; None to keep the policy."""


def advance(
    state: ResetState, observation: Observation, *, config: ResetConfig
) -> tuple[ResetState, ResetDecision]:
    """The state after an observation, and the decision it leads to.

    On a reset the returned state already counts it. Raises `AlgorithmError` when the step goes
    backwards.
    """
    if observation.step < state.step:
        raise AlgorithmError(
            f"step={observation.step} after step {state.step}; the reset controller and the "
            "learner disagree: load both from the same checkpoint"
        )
    seen = _observe(state, observation)
    trigger, reason = _find_trigger(state, seen, observation, config)
    distance = observation.step - state.last_reset_step
    # A first reset has no predecessor to keep its distance from.
    too_near = state.num_resets > 0 and distance < config.min_distance_steps
    if trigger is Trigger.none:
        return seen, _keep(seen, trigger, reason)
    if too_near and trigger is not Trigger.manual:
        held = (
            f"held back: {reason}; {distance} steps since the last reset, "
            f"min_distance_steps={config.min_distance_steps}"
        )
        return seen, _keep(seen, trigger, held)
    after = replace(
        seen,
        num_resets=seen.num_resets + 1,
        last_reset_step=observation.step,
        era_best_score=None,
        validations_without_best=0,
        last_manual_request=observation.manual_request or seen.last_manual_request,
    )
    return after, ResetDecision(
        reset=True,
        trigger=trigger,
        reason=reason,
        step=observation.step,
        reset_index=after.num_resets,
        reset_optimizer=config.reset_optimizer,
        roll_back_step=_roll_back_step(seen, observation, config),
    )


def _observe(state: ResetState, observation: Observation) -> ResetState:
    score = observation.validation_score
    if score is None or not math.isfinite(score):
        return replace(state, step=observation.step)
    is_best = state.best_score is None or score > state.best_score
    is_era_best = state.era_best_score is None or score > state.era_best_score
    return replace(
        state,
        step=observation.step,
        last_score=score,
        best_score=score if is_best else state.best_score,
        best_step=observation.step if is_best else state.best_step,
        era_best_score=score if is_era_best else state.era_best_score,
        validations_without_best=0 if is_era_best else state.validations_without_best + 1,
    )


def _find_trigger(
    state: ResetState, seen: ResetState, observation: Observation, config: ResetConfig
) -> tuple[Trigger, str]:
    """The most urgent trigger that is due, with its numbers."""
    request = observation.manual_request
    if request is not None and request != state.last_manual_request:
        return Trigger.manual, f"requested by the user ({request})"
    kl, limit = observation.kl, config.kl_spike
    if kl is not None and limit is not None and (kl > limit and not math.isnan(kl)):
        return Trigger.kl_spike, f"KL {kl:.6g} exceeds kl_spike={limit:.6g}"
    return _find_slow_trigger(seen, observation, config)


def _find_slow_trigger(
    seen: ResetState, observation: Observation, config: ResetConfig
) -> tuple[Trigger, str]:
    best, last, drop = seen.era_best_score, seen.last_score, config.degradation
    fresh = seen.validations_without_best > 0
    if drop is not None and best is not None and last is not None and fresh and best - last > drop:
        fall = f"validation {last:.6g} is {best - last:.6g} below its best {best:.6g}"
        return Trigger.degradation, f"{fall}, degradation={drop:.6g}"
    stall = config.stall_validations
    if stall is not None and seen.validations_without_best >= stall:
        waited = f"{seen.validations_without_best} validations without a new best"
        return Trigger.stall, f"{waited}, stall_validations={stall}"
    every = config.every_steps
    distance = observation.step - seen.last_reset_step
    if every is not None and distance >= every:
        return (
            Trigger.schedule,
            f"{distance} steps since the last reset, every_steps={every}",
        )
    return Trigger.none, "nothing is due"


def _roll_back_step(seen: ResetState, observation: Observation, config: ResetConfig) -> int | None:
    if not config.roll_back or seen.best_step is None or seen.best_step == observation.step:
        return None
    return seen.best_step


def _keep(state: ResetState, trigger: Trigger, reason: str) -> ResetDecision:
    return ResetDecision(
        reset=False,
        trigger=trigger,
        reason=reason,
        step=state.step,
        reset_index=state.num_resets,
        reset_optimizer=False,
        roll_back_step=None,
    )


def state_to_json(state: ResetState) -> dict[str, Any]:
    """The state as plain JSON values, with its format number."""
    return {"format": FORMAT, **asdict(state)}


def state_from_json(data: dict[str, Any]) -> ResetState:
    """Inverse of `state_to_json`; raises `ResetStateError` for a newer or damaged state."""
    number = data.get("format")
    if not isinstance(number, int) or number > FORMAT or number < 1:
        raise ResetStateError(
            f"reset state has format={number!r}, this version reads up to {FORMAT}; "
            "resume with the version that wrote the checkpoint, or a newer one"
        )
    fields = {name: value for name, value in data.items() if name != "format"}
    try:
        return ResetState(**fields)
    except TypeError as err:
        raise ResetStateError(f"reset state is damaged: {err}; use an older checkpoint") from err
