"""What the loop holds, what it tells the buffer and what it writes. Knows no order of things.

All ranks have one; rank 0 alone talks to the buffer, and what it hears is broadcast.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from hpc.files import publish
from prorl_hpc.buffer.messages import Fenced, GroupRef, WireError
from prorl_hpc.learner.background import Job
from prorl_hpc.learner.checkpoint import LearnerState, rng_text
from prorl_hpc.learner.collect import Batch, NoBatch
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.output import Outputs
from prorl_hpc.learner.record import Recorder
from prorl_hpc.learner.reset import state_from_json
from prorl_hpc.learner.shared import Client
from prorl_hpc.learner.step import Stepper
from prorl_hpc.recipe import Recipe
from prorl_hpc.records import Group
from prorl_hpc.run import Run

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class LoopState:
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

    @property
    def _all_stepped(self) -> bool:
        return self.state.step >= self.recipe.steps

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

    # ---- What is due, and what is written ----

    def _validation_due(self, step: int) -> bool:
        if step == 0:
            return self.recipe.validation.at_start
        return step % self.recipe.validation.every_steps == 0 or step >= self.recipe.steps

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
        """Rank 0 writes down the step, for the job's chain."""
        path = self.run.progress("learner", index=0)

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            publish(path, data=str(self.state.step).encode())

        self.outputs.space.write("the learner's progress", write)
