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
from dataclasses import dataclass, fields
from typing import Protocol

import msgspec

from hpc.errors import HpcError
from hpc.files import publish
from prorl_hpc.buffer.messages import GroupIds, GroupRef
from prorl_hpc.learner.checkpoint import (
    LearnerState,
    keep_last,
    load_policy,
    rng_text,
    save_checkpoint,
)
from prorl_hpc.learner.collect import Batch, Collector, GroupSource
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.filtering import EffectiveSamples
from prorl_hpc.learner.publish import export, publish_version
from prorl_hpc.learner.record import Recorder
from prorl_hpc.learner.reference import Reference
from prorl_hpc.learner.reset import (
    Observation,
    ResetDecision,
    advance,
    state_from_json,
    state_to_json,
)
from prorl_hpc.learner.step import Stepper
from prorl_hpc.learner.validate import Interrupted, ValidationLine, ValidationSource, run_validation
from prorl_hpc.recipe import Recipe
from prorl_hpc.records import Group
from prorl_hpc.run import Run

MAX_IDLE_STEPS = 5
"""So many steps in a row that change nothing end the run with what to change."""


class TrainError(HpcError, RuntimeError):
    """Training can't go on; another attempt would not help."""


class Client(GroupSource, ValidationSource, Protocol):
    """The buffer as the loop sees it (prorl_hpc.buffer.client.LearnerClient)."""

    def announce(self, version: int, *, consumed: GroupIds, filtered: int, step: int) -> None: ...

    def published(self, version: int) -> None: ...

    def checkpointed(self, step: int, consumed: GroupIds) -> None: ...

    def finish(self, reason: str) -> None: ...


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
    stop_reason: Callable[[], str | None]
    """Why to stop (deadline, signal); None to go on. Asked on rank 0."""
    idle_steps: int = 0
    saved_step: int = -1
    announced: bool = False

    def start(self, *, resumed: bool) -> None:
        """Tells the buffer where training stands, with the policy of that place published."""
        if resumed:
            self.saved_step = self.state.step
            self.state = msgspec.structs.replace(self.state, version=self.state.step)
            self._publish()
        if self.ranks.is_first:
            self.client.announce(
                self.state.version,
                consumed=self.state.consumed,
                filtered=self._filtered(),
                step=self.state.step,
            )
            self.announced = True
            if resumed:
                self.client.checkpointed(self.state.step, self.state.consumed)
        self._progress()

    def train(self) -> str:
        """Runs until all steps are done ("done") or a stop is wanted (its reason)."""
        while True:
            reason = self.ranks.broadcast(self.stop_reason() if self.ranks.is_first else None)
            if reason is None and self._decide():
                if self.state.step >= self.recipe.steps:
                    return self._finish()
                if self._step():
                    continue
            reason = reason or self.ranks.broadcast(self._why_stopped())
            self._checkpoint()
            return reason

    def _why_stopped(self) -> str:
        return (self.stop_reason() if self.ranks.is_first else None) or "the buffer is stopping"

    def _filtered(self) -> int:
        """Groups to be replaced: consumed beyond one batch per step."""
        return len(self.state.consumed) - self.state.step * self.recipe.algorithm.batch_groups

    # ---- Validation and resets ----

    def _decide(self) -> bool:
        """Validates and resets where this step wants it; False when the learner is to stop."""
        state = self.state
        if state.decided_step >= state.step:
            return True
        score = None
        if self._validation_due(state.step):
            mine: ValidationLine | Interrupted = (
                self._validate() if self.ranks.is_first else Interrupted()
            )
            line = self.ranks.broadcast(mine)
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
            path = self.run.checkpoint(decision.roll_back_step)
            if self.ranks.broadcast(path.is_dir()):
                load_policy(path, model=stepper.model, ranks=self.ranks)
        if decision.reset_optimizer:
            stepper.optimizer.state.clear()
        if stepper.objective.needs_reference:
            stepper.reference = Reference.of(
                stepper.model, index=decision.reset_index, step=decision.step, ranks=self.ranks
            )
        if self.ranks.is_first:
            self.recorder.reset(decision)

    # ---- One step ----

    def _step(self) -> bool:
        """Collects and trains one batch; False when the learner is to stop instead."""
        started = time.monotonic()
        batch = self.ranks.broadcast(self._collect() if self.ranks.is_first else None)
        if batch is None:
            return False
        state = self.state
        metrics = dict(batch.metrics)
        kl, skipped = None, True
        if batch.samples:
            result = self.stepper.run(batch.samples, batch.shaped_rewards, step=state.step)
            metrics |= result.metrics
            kl = result.kl
            skipped = result.num_skipped > 0
        self.idle_steps = self.idle_steps + 1 if skipped else 0
        self.state = msgspec.structs.replace(
            state,
            step=state.step + 1,
            version=state.step + 1 if self._publication_due(state.step + 1) else state.version,
            consumed=state.consumed.union(batch.consumed),
            samples=_add(state.samples, batch.counts),
            last_kl=kl,
            skipped_steps=state.skipped_steps + int(skipped),
        )
        self._after_step(metrics, batch, started=started)
        if self.idle_steps >= MAX_IDLE_STEPS:
            raise TrainError(self._idle_complaint(bool(batch.samples)))
        return True

    def _collect(self) -> Batch | None:
        collector = Collector(
            self.recipe,
            source=self.client,
            read=self.read,
            stopping=lambda: self.stop_reason() is not None,
        )
        return collector.collect(
            step=self.state.step,
            version=self.state.version,
            num_consumed=len(self.state.consumed),
        )

    def _after_step(self, metrics: dict[str, float], batch: Batch, *, started: float) -> None:
        begun = time.monotonic()
        if self.state.version == self.state.step:
            self._publish()
        published = time.monotonic()
        if self._checkpoint_due(self.state.step):
            self._checkpoint()
        if self.ranks.is_first:
            self.client.filtered(self._filtered())
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

    def _publish(self) -> None:
        version = self.state.version
        publish_version(
            self.run,
            model=self.stepper.model,
            version=version,
            ranks=self.ranks,
            keep=self.recipe.learner.keep_policies,
        )
        every = self.recipe.learner.export_every_steps
        if every is not None and version % every == 0:
            target = self.run.root / "export" / f"step-{version:08d}"
            export(
                self.run, model=self.stepper.model, version=version, target=target, ranks=self.ranks
            )
        if self.announced:
            self.client.published(version)

    def _checkpoint(self) -> None:
        state = msgspec.structs.replace(
            self.state,
            reference=self.stepper.reference.identity if self.stepper.reference else None,
            has_moments=bool(self.stepper.optimizer.state),
            rng=rng_text(),
            world=self.ranks.world,
        )
        if self.saved_step == state.step:
            return
        save_checkpoint(
            self.run,
            state,
            model=self.stepper.model,
            optimizer=self.stepper.optimizer,
            reference=self.stepper.reference,
            ranks=self.ranks,
        )
        self.saved_step = state.step
        if self.ranks.is_first:
            best = state_from_json(state.reset).best_step
            keep_last(self.run, self.recipe.learner.keep_checkpoints, protect=(best,))
            self.client.checkpointed(state.step, state.consumed)

    def _progress(self) -> None:
        if self.ranks.is_first:
            path = self.run.progress("learner", index=0)
            path.parent.mkdir(parents=True, exist_ok=True)
            publish(path, data=str(self.state.step).encode())

    def _finish(self) -> str:
        self._checkpoint()
        if self.ranks.is_first:
            self.client.finish(f"all {self.recipe.steps} steps are done")
        return "done"


def _add(left: EffectiveSamples, right: EffectiveSamples) -> EffectiveSamples:
    return EffectiveSamples(
        **{f.name: getattr(left, f.name) + getattr(right, f.name) for f in fields(left)}
    )
