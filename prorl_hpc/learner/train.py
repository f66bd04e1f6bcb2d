"""The learner's loop. Knows every room of the learner; draws the order of things and nothing else.

    +--> stop wanted? --yes--> checkpoint, exit "continue"
    |    validation due -> score -> reset controller -> maybe reset reference (and optimizer)
    |    all steps done? --yes--> checkpoint, tell the buffer, exit "done"
    |    collect groups -> step -> publish policy -> checkpoint
    +----------------------------------------------------------+

All ranks run this loop in step; rank 0 alone talks to the buffer and decides, and broadcasts.
What a checkpoint holds is enough to go on at the same place: decisions are made at the top of the
loop, so that a resumed run makes the ones that were pending.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TypeVar

import msgspec

from hpc.errors import HpcError
from hpc.files import publish
from prorl_hpc.buffer.messages import Fenced, GroupRef, WireError
from prorl_hpc.learner.background import Job
from prorl_hpc.learner.checkpoint import LearnerState, load_policy, rng_text
from prorl_hpc.learner.collect import Batch, Collector, NoBatch
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.filtering import EffectiveSamples
from prorl_hpc.learner.model import load_weights
from prorl_hpc.learner.output import Outputs
from prorl_hpc.learner.record import Recorder, log
from prorl_hpc.learner.reference import Reference
from prorl_hpc.learner.reset import (
    Observation,
    ResetDecision,
    advance,
    state_from_json,
    state_to_json,
)
from prorl_hpc.learner.shared import Client
from prorl_hpc.learner.step import Stepper
from prorl_hpc.learner.validate import Interrupted, ValidationLine, run_validation
from prorl_hpc.recipe import Recipe
from prorl_hpc.records import Group
from prorl_hpc.run import Run

T = TypeVar("T")

BUFFER_STOPS = "the buffer is stopping"

MAX_IDLE_STEPS = 5
"""So many steps in a row that change nothing end the run with what to change."""


class TrainError(HpcError, RuntimeError):
    """Training can't go on; another attempt would not help."""


@dataclass(kw_only=True, slots=True)
class Loop:
    """Everything the loop works with. `client`, `read` and `recorder` are used on rank 0 only."""

    recipe: Recipe
    run: Run
    ranks: Ranks
    stepper: Stepper
    state: LearnerState
    client: Client
    read: Callable[[GroupRef], Group]
    recorder: Recorder
    outputs: Outputs
    stop_reason: Callable[[], str | None]
    """Why to stop (deadline, signal); None to go on. Asked on rank 0."""
    idle_steps: int = 0
    saved_step: int = -1
    announced: bool = False
    lost: WireError | NoBatch | None = None
    """Rank 0: what took the buffer away; nothing is asked of it any more."""
    ahead: Job[Batch | None] | None = None
    """Rank 0: the next batch, read while the step before it runs."""
    closing: bool = False

    def start(self, *, resumed: bool) -> None:
        """Tells the buffer where training stands, with the policy of that place published."""
        if resumed:
            self.saved_step = self.state.step
            self.state = msgspec.structs.replace(
                self.state, version=self._version_of(self.state.step)
            )
            self._publish()
        self._tell(
            lambda: self.client.announce(
                self.state.version,
                consumed=self.state.consumed,
                filtered=self._filtered(),
                step=self.state.step,
            )
        )
        self.announced = self.ranks.is_first
        if resumed:
            self._tell(lambda: self.client.checkpointed(self.state.step, self.state.consumed))
        self._progress()

    def train(self) -> str:
        """Runs until all steps are done ("done") or a stop is wanted (its reason).

        Raises on rank 0, after a checkpoint, what took the buffer away. Nothing is under way any
        more when this returns or raises.
        """
        try:
            return self._train()
        finally:
            self.closing = True
            if self.ahead is not None:
                with suppress(HpcError):
                    self.ahead.result()
            self.outputs.close()

    def _train(self) -> str:
        reason = self._reason()
        while reason is None:
            if not self._decide():
                reason = self._reason() or BUFFER_STOPS
            elif self._all_stepped:
                return self._finish()
            elif self._step():
                reason = self._reason()
            else:
                reason = self._reason() or BUFFER_STOPS
        return self._end(reason)

    @property
    def _all_stepped(self) -> bool:
        return self.state.step >= self.recipe.steps

    def _reason(self) -> str | None:
        """Why training can't go on, on every rank; None when it can."""
        mine = None
        if self.ranks.is_first:
            mine = self.stop_reason() or (None if self.lost is None else str(self.lost))
        return self.ranks.broadcast(mine)

    def _end(self, reason: str) -> str:
        """Checkpoint, and what is to be said. A run whose steps are done needs no buffer."""
        stopped = self.ranks.broadcast(self.stop_reason() if self.ranks.is_first else None)
        if self._all_stepped:
            decided = self.state.decided_step >= self.state.step
            gone = self.ranks.broadcast(self.lost is not None and stopped is None)
            if gone and not decided and self.ranks.is_first:
                self.recorder.event("validation_left_out", step=self.state.step, reason=reason)
                log(f"all steps are done; the last validation is left out: {reason}")
            if decided or gone:
                return self._finish()
        self._checkpoint()
        self.outputs.settle()
        if self.lost is not None and stopped is None:
            raise self.lost
        return stopped or reason

    def _tell(self, notice: Callable[[], None]) -> None:
        """Rank 0 tells the buffer something; a lost buffer ends training at the next turn."""
        if self.ranks.is_first and self.lost is None:
            self._asking(notice)

    def _asking(self, question: Callable[[], T]) -> T | None:
        """The buffer's answer; None, and `lost` is set, when there is none. Raises Fenced."""
        try:
            return question()
        except Fenced:
            raise
        except (WireError, NoBatch) as err:
            self.lost = err
            return None

    def _version_of(self, step: int) -> int:
        """The policy version of a step: each roll-back took one of its own."""
        return step + self.state.roll_backs

    def _filtered(self) -> int:
        """Groups to be replaced: consumed beyond one batch per step (and per roll-back)."""
        expected = self._version_of(self.state.step) * self.recipe.algorithm.batch_groups
        return len(self.state.consumed) - expected

    # ---- Validation and resets ----

    def _decide(self) -> bool:
        """Validates and resets where this step wants it; False when the learner is to stop."""
        state = self.state
        if state.decided_step >= state.step:
            return True
        score = None
        if self._validation_due(state.step):
            # What was validated is part of every later history only once its checkpoint is whole.
            self.outputs.settle()
            mine = self._asking(self._validate) if self.ranks.is_first else None
            line = self.ranks.broadcast(mine or Interrupted())
            if isinstance(line, Interrupted):
                return False
            score = line.score
        observation = Observation(
            step=state.step,
            validation_score=score,
            kl=state.last_kl,
            manual_request=self.ranks.broadcast(self._manual_request()),
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

    def _validation_due(self, step: int) -> bool:
        if step == 0:
            return self.recipe.validation.at_start
        return step % self.recipe.validation.every_steps == 0 or step >= self.recipe.steps

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
        if not self.ranks.is_first:
            return None
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
        if stepper.objective.needs_reference:
            stepper.reference = Reference.of(
                stepper.model, index=decision.reset_index, step=decision.step, ranks=self.ranks
            )
        if self.ranks.is_first:
            self.recorder.reset(decision)

    def _roll_back(self, step: int) -> None:
        """The best policy so far takes the place of this one, for the rollouts too, at once."""
        self.outputs.settle()
        problem = None
        if step == 0:
            load_weights(self.stepper.model, self.run.model_start)
        else:
            path = self.run.checkpoint(step)
            problem = load_policy(path, model=self.stepper.model, ranks=self.ranks)
        if problem is None:
            roll_backs = self.state.roll_backs + 1
            self.state = msgspec.structs.replace(
                self.state, roll_backs=roll_backs, version=self.state.step + roll_backs
            )
            # First the groups, then the version: together they allow as many groups as before.
            self._tell(lambda: self.client.filtered(self._filtered()))
            self._publish()
        if self.ranks.is_first:
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

    # ---- One step ----

    def _step(self) -> bool:
        """Collects and trains one batch; False when the learner is to stop instead."""
        started = time.monotonic()
        mine = self._asking(self._next_batch) if self.ranks.is_first else None
        batch = self.ranks.broadcast(mine)
        if batch is None:
            return False
        state = self.state
        self.state = msgspec.structs.replace(
            state,
            step=state.step + 1,
            version=self._version_of(state.step + 1)
            if self._publication_due(state.step + 1)
            else state.version,
            consumed=state.consumed.union(batch.consumed),
            samples=_add(state.samples, batch.counts),
        )
        self._read_ahead()
        metrics = dict(batch.metrics)
        kl, skipped = None, True
        if batch.samples:
            result = self.stepper.run(batch.samples, batch.shaped_rewards, step=state.step)
            metrics |= result.metrics
            kl = result.kl
            skipped = result.num_skipped > 0
        self.idle_steps = self.idle_steps + 1 if skipped else 0
        self.state = msgspec.structs.replace(
            self.state, last_kl=kl, skipped_steps=state.skipped_steps + int(skipped)
        )
        self._after_step(metrics, batch, started=started)
        if self.idle_steps >= MAX_IDLE_STEPS:
            raise TrainError(self._idle_complaint(bool(batch.samples)))
        return True

    def _next_batch(self) -> Batch | None:
        ahead, self.ahead = self.ahead, None
        return self._collect() if ahead is None else ahead.result()

    def _read_ahead(self) -> None:
        """Starts on the next batch, unless something is to be decided before it."""
        step = self.state.step
        decides = self._validation_due(step) or self.recipe.algorithm.reset.roll_back
        if self.ranks.is_first and not (self.recipe.learner.deterministic or decides or self.lost):
            total, collect = self._filtered(), self._collector()

            def read() -> Batch | None:
                self.client.filtered(total)
                return collect()

            self.ahead = Job(read, name="next-batch")

    def _collect(self) -> Batch | None:
        return self._collector()()

    def _collector(self) -> Callable[[], Batch | None]:
        """Collects the batch of the state's step, as the state is now."""
        collector = Collector(
            self.recipe,
            source=self.client,
            read=self.read,
            stopping=lambda: self.closing or self.stop_reason() is not None,
        )
        state = self.state
        return lambda: collector.collect(
            step=state.step,
            version=state.version,
            num_consumed=len(state.consumed),
            roll_backs=state.roll_backs,
        )

    def _after_step(self, metrics: dict[str, float], batch: Batch, *, started: float) -> None:
        begun = time.monotonic()
        published_now = self.state.version == self._version_of(self.state.step)
        if published_now or self._export_due:
            self._publish(publish=published_now)
        published = time.monotonic()
        if self._checkpoint_due(self.state.step):
            self._checkpoint()
        if self.ahead is None:
            self._tell(lambda: self.client.filtered(self._filtered()))
        if self.ranks.is_first:
            self.recorder.step(
                self.state,
                metrics
                | {
                    "publish_seconds": published - begun,
                    "checkpoint_seconds": time.monotonic() - published,
                    "step_seconds": time.monotonic() - started,
                },
                batch.tasks,
            )
        self._progress()

    def _idle_complaint(self, has_samples: bool) -> str:
        if has_samples:
            return (
                f"the gradient wasn't finite in {self.idle_steps} steps in a row; lower "
                "algorithm.learning_rate, or resume from an earlier checkpoint"
            )
        return (
            f"no group carried a signal in {self.idle_steps} steps in a row (all rewards of a "
            "group equal); choose instances that the policy sometimes solves, raise "
            "algorithm.num_rollouts, or warm the model up"
        )

    # ---- What is due, and what is written ----

    def _publication_due(self, step: int) -> bool:
        every = self.recipe.learner.publish_every_steps
        return step % every == 0 or step >= self.recipe.steps or self._validation_due(step)

    def _checkpoint_due(self, step: int) -> bool:
        # Before each validation too: what was validated is then part of every later history.
        every = self.recipe.learner.checkpoint_every_steps
        return step % every == 0 or self._validation_due(step)

    @property
    def _export_due(self) -> bool:
        every = self.recipe.learner.export_every_steps
        return every is not None and (self.state.step % every == 0 or self._all_stepped)

    def _publish(self, *, publish: bool = True) -> None:
        version = self.state.version
        announced = self.announced

        def then() -> None:
            if announced:
                self._tell(lambda: self.client.published(version))

        self.outputs.policy(
            self.stepper.model,
            version=version,
            step=self.state.step,
            publish=publish,
            export=self._export_due,
            then=then,
        )

    def _checkpoint(self) -> None:
        """Begins a checkpoint unless this state has one; see `Outputs.settle`."""
        state = msgspec.structs.replace(
            self.state,
            reference=self.stepper.reference.identity if self.stepper.reference else None,
            has_moments=bool(self.stepper.optimizer.state),
            rng=rng_text(),
            world=self.ranks.world,
        )
        if self.saved_step == state.step:
            return
        self.outputs.checkpoint(
            state,
            model=self.stepper.model,
            optimizer=self.stepper.optimizer,
            reference=self.stepper.reference,
            best=state_from_json(state.reset).best_step,
            then=lambda: self._tell(lambda: self.client.checkpointed(state.step, state.consumed)),
        )
        self.saved_step = state.step

    def _progress(self) -> None:
        if self.ranks.is_first:
            path = self.run.progress("learner", index=0)
            path.parent.mkdir(parents=True, exist_ok=True)
            publish(path, data=str(self.state.step).encode())

    def _finish(self) -> str:
        self._checkpoint()
        self.outputs.settle()
        self._tell(lambda: self.client.finish(f"all {self.recipe.steps} steps are done"))
        if self.lost is not None:
            log(f"the buffer couldn't be told that all steps are done: {self.lost}")
        return "done"


def _add(left: EffectiveSamples, right: EffectiveSamples) -> EffectiveSamples:
    return EffectiveSamples(
        **{f.name: getattr(left, f.name) + getattr(right, f.name) for f in fields(left)}
    )
