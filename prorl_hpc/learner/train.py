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

import msgspec

from hpc.errors import HpcError
from prorl_hpc.learner.background import Job
from prorl_hpc.learner.collect import Batch, Collector
from prorl_hpc.learner.decide import Deciding
from prorl_hpc.learner.filtering import EffectiveSamples
from prorl_hpc.learner.record import log
from prorl_hpc.learner.together import on_first
from prorl_hpc.policy import discard_newer

BUFFER_STOPS = "the buffer is stopping"

MAX_IDLE_STEPS = 5
"""So many steps in a row that change nothing end the run with what to change."""


class TrainError(HpcError, RuntimeError):
    """Training can't go on; another attempt would not help."""


@dataclass(kw_only=True, slots=True)
class Loop(Deciding):
    """Training from where the state stands to the end, or to a stop."""

    def start(self, *, resumed: bool) -> None:
        """Tells the buffer where training stands, with the policy of that place published."""
        if resumed:
            self.saved_step = self.state.step
            self.state = msgspec.structs.replace(
                self.state, version=self._version_of(self.state.step)
            )
            self._publish()
            self.outputs.settle()
        on_first(self.ranks, lambda: self._announce(resumed=resumed))
        self.announced = self.ranks.is_first

    def _announce(self, *, resumed: bool) -> None:
        """Rank 0. Versions of a lost history go once `latest` names one that stays."""
        state = self.state
        discard_newer(self.run, state.version)
        self._tell(
            lambda: self.client.announce(
                state.version,
                consumed=state.consumed,
                filtered=self._filtered(),
                step=state.step,
            )
        )
        if resumed:
            self._tell(lambda: self.client.checkpointed(state.step, state.consumed))
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
            if gone and not decided:
                on_first(self.ranks, lambda: self._leave_validation_out(reason))
            if decided or gone:
                return self._finish()
        self._checkpoint()
        self.outputs.settle()
        if self.lost is not None and stopped is None:
            raise self.lost
        return stopped or reason

    def _leave_validation_out(self, reason: str) -> None:
        self.recorder.event("validation_left_out", step=self.state.step, reason=reason)
        log(f"all steps are done; the last validation is left out: {reason}")

    def _finish(self) -> str:
        self._checkpoint()
        self.outputs.settle()
        on_first(
            self.ranks,
            lambda: self._tell(
                lambda: self.client.finish(f"all {self.recipe.steps} steps are done")
            ),
        )
        if self.lost is not None:
            log(f"the buffer couldn't be told that all steps are done: {self.lost}")
        return "done"

    # ---- One step ----

    def _step(self) -> bool:
        """Collects and trains one batch; False when the learner is to stop instead."""
        started = time.monotonic()
        batch = on_first(self.ranks, lambda: self._asking(self._next_batch))
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
        self.outputs.check()
        published_now = self.state.version == self._version_of(self.state.step)
        if published_now or self._export_due:
            self._publish(publish=published_now)
        published = time.monotonic()
        if self._checkpoint_due(self.state.step):
            self._checkpoint()
        saved = time.monotonic()
        metrics = metrics | {
            "publish_seconds": published - begun,
            "checkpoint_seconds": saved - published,
            "step_seconds": saved - started,
        }
        on_first(self.ranks, lambda: self._record(metrics, batch))

    def _record(self, metrics: dict[str, float], batch: Batch) -> None:
        if self.ahead is None:
            self._tell(lambda: self.client.filtered(self._filtered()))
        self.recorder.step(self.state, metrics, batch.tasks)
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


def _add(left: EffectiveSamples, right: EffectiveSamples) -> EffectiveSamples:
    return EffectiveSamples(
        **{f.name: getattr(left, f.name) + getattr(right, f.name) for f in fields(left)}
    )
