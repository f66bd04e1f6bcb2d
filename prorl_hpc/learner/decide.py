"""Decisions between two steps: validation, reference resets, roll-backs. Knows no batch.

validation due? -> score -+-> reset controller -> roll back? -> clear optimizer? -> reference
KL of the step -----------+
a user's request ---------+
"""

from dataclasses import dataclass

import msgspec

from prorl_hpc.learner.checkpoint import load_policy
from prorl_hpc.learner.loop import LoopState
from prorl_hpc.learner.model import load_weights
from prorl_hpc.learner.record import log
from prorl_hpc.learner.reset import (
    Observation,
    ResetDecision,
    advance,
    state_from_json,
    state_to_json,
)
from prorl_hpc.learner.together import on_all, on_first
from prorl_hpc.learner.validate import Interrupted, ValidationLine, run_validation


@dataclass(kw_only=True, slots=True)
class Deciding(LoopState):
    """The loop's decisions; made at its top, so that a resumed run makes those pending."""

    def _decide(self) -> bool:
        """Validates and resets where this step wants it; False when the learner is to stop."""
        state = self.state
        if state.decided_step >= state.step:
            return True
        score = None
        if self._validation_due(state.step):
            # What was validated is part of every later history only once its checkpoint is whole.
            self.outputs.settle()
            line = on_first(self.ranks, lambda: self._asking(self._validate)) or Interrupted()
            if isinstance(line, Interrupted):
                return False
            score = line.score
        observation = Observation(
            step=state.step,
            validation_score=score,
            kl=state.last_kl,
            manual_request=on_first(self.ranks, self._manual_request),
        )
        after, decision = advance(
            state_from_json(state.reset), observation, config=self.recipe.algorithm.reset
        )
        self.state = msgspec.structs.replace(
            state, reset=state_to_json(after), decided_step=state.step
        )
        if decision.reset:
            self._reset(decision)
        if decision.reset or score is not None:
            self.saved_step = -1  # the next checkpoint of this step holds more than the last
        return True

    def _validate(self) -> ValidationLine | Interrupted:
        line = run_validation(
            self.recipe,
            source=self.client,
            read=self.read,
            step=self.state.step,
            version=self.state.version,
            stopping=lambda: self.stop_reason() is not None,
        )
        if isinstance(line, ValidationLine):
            self.recorder.validation(line)
        return line

    def _manual_request(self) -> str | None:
        path = self.run.requests / "reset-reference"
        try:
            return f"{path.read_text().strip()} {path.stat().st_mtime_ns}".strip()
        except OSError:
            return None

    def _reset(self, decision: ResetDecision) -> None:
        """Hard reset: the reference becomes the policy; the optimizer starts anew if so decided."""
        stepper = self.stepper
        if decision.roll_back_step is not None:
            self._roll_back(decision.roll_back_step)
        if decision.reset_optimizer:
            stepper.optimizer.state.clear()
        stepper.renew_reference(index=decision.reset_index, step=decision.step)
        on_first(self.ranks, lambda: self.recorder.reset(decision))

    def _roll_back(self, step: int) -> None:
        """The best policy so far takes the place of this one, for the rollouts too, at once."""
        self.outputs.settle()
        problem = None
        if step == 0:
            on_all(self.ranks, lambda: load_weights(self.stepper.model, self.run.model_start))
        else:
            path = self.run.checkpoint(step)
            problem = load_policy(path, model=self.stepper.model, ranks=self.ranks)
        if problem is None:
            roll_backs = self.state.roll_backs + 1
            self.state = msgspec.structs.replace(
                self.state, roll_backs=roll_backs, version=self.state.step + roll_backs
            )
            # First the groups, then the version: together they allow as many groups as before.
            on_first(self.ranks, lambda: self._tell(lambda: self.client.filtered(self._filtered())))
            self._publish()
        on_first(self.ranks, lambda: self._record_roll_back(step, problem))

    def _record_roll_back(self, step: int, problem: str | None) -> None:
        self.recorder.event(
            "roll_back",
            step=self.state.step,
            to_step=step,
            version=self.state.version,
            problem=problem or "",
        )
        done = f"published as version {self.state.version}"
        left = f"left out, training goes on with the present policy: {problem}"
        log(f"roll-back to the policy of step {step}: {left if problem else done}")
