"""Policies, exports and checkpoints on their way to the disk. Knows files and ranks; no buffer.

    tensors --copy to main memory (the pause)--> thread: write, hash, fsync, rename, tell

At most one policy and one checkpoint are under way; the next one waits for its predecessor. What
went wrong is raised on every rank when it is waited for. A crash in between leaves the checkpoint
and the policy before: names appear only when all their bytes are on disk.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hpc.errors import HpcError
from prorl_hpc.learner.background import Line
from prorl_hpc.learner.checkpoint import (
    LearnerState,
    keep_last,
    save_checkpoint,
    snapshot,
    write_checkpoint,
)
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.model import PolicyModel, gather_adapter, gather_weights
from prorl_hpc.learner.publish import write_export, write_version
from prorl_hpc.learner.record import log
from prorl_hpc.learner.reference import Reference
from prorl_hpc.learner.space import SpaceWait
from prorl_hpc.learner.together import on_all
from prorl_hpc.recipe import LearnerConfig
from prorl_hpc.run import Run


class OutputError(HpcError, RuntimeError):
    """What should have been written isn't, for a reason that another attempt won't mend."""


@dataclass(kw_only=True, slots=True)
class Outputs:
    """What the loop writes, beside training unless the mode is deterministic."""

    run: Run
    config: LearnerConfig
    ranks: Ranks
    stopping: Callable[[], bool] = lambda: False
    """Whether a stop is wanted: nobody waits for space any longer. Asked on rank 0."""
    closing: bool = False
    space: SpaceWait = field(init=False)
    _policies: Line = field(init=False)
    _checkpoints: Line = field(init=False)

    def __post_init__(self) -> None:
        self.space = SpaceWait(
            limit_seconds=self.config.batch_seconds,
            stopping=lambda: self.closing or self.stopping(),
            report=log,
        )
        self._policies = Line(name="publish", beside=self._beside)
        self._checkpoints = Line(name="checkpoint", beside=self._beside)

    @property
    def _beside(self) -> bool:
        return not self.config.deterministic

    def policy(
        self,
        model: PolicyModel,
        *,
        version: int,
        step: int,
        publish: bool,
        export: bool,
        then: Callable[[], None],
    ) -> None:
        """Publishes and exports the model, as asked; `then` runs on rank 0 once it is published."""
        self._settle(self._policies)
        weights = gather_weights(model, dtype=model.dtype, ranks=self.ranks)
        adapter = gather_adapter(model, ranks=self.ranks)

        def write() -> None:
            if publish:
                keep = self.config.keep_policies
                self.space.write(
                    f"policy version {version}",
                    lambda: write_version(
                        self.run, weights, version=version, step=step, keep=keep, adapter=adapter
                    ),
                )
                then()
            if export:
                target = self.run.export(step)
                self.space.write(
                    f"export of step {step}",
                    lambda: write_export(
                        self.run,
                        weights,
                        version=version,
                        step=step,
                        target=target,
                        adapter=adapter,
                    ),
                )

        what = f"policy version {version}"
        self._put(self._policies, write if self.ranks.is_first else lambda: None, what=what)

    def checkpoint(
        self,
        state: LearnerState,
        *,
        model: PolicyModel,
        optimizer: torch.optim.Optimizer,
        reference: Reference | None,
        best: int | None,
        then: Callable[[], None],
    ) -> None:
        """Writes a checkpoint; `then` runs on rank 0 once it is durable. Keeps `best` besides."""
        self._settle(self._checkpoints)
        copied = None
        if self._beside:
            copied = snapshot(model, optimizer, reference, ranks=self.ranks)

        ranks = self.ranks if copied is None else self.ranks.beside()

        def try_once() -> None:
            if copied is None:
                save_checkpoint(
                    self.run,
                    state,
                    model=model,
                    optimizer=optimizer,
                    reference=reference,
                    ranks=ranks,
                )
            else:
                write_checkpoint(self.run, state, copied, ranks=ranks)

        what = f"checkpoint of step {state.step}"

        def write() -> None:
            self.space.write(what, try_once, ranks=ranks)
            if ranks.is_first:
                keep_last(self.run, self.config.keep_checkpoints, protect=(best,))
                then()

        self._put(self._checkpoints, write, what=what)

    def check(self) -> None:
        """Raises on every rank what has gone wrong by now; waits for nothing."""
        if self._beside:
            for line in (self._policies, self._checkpoints):
                self._agree(line.check)

    def settle(self) -> None:
        """Returns when all is on disk. Raises on every rank when something isn't."""
        self._settle(self._policies)
        self._settle(self._checkpoints)

    def close(self) -> None:
        """Waits without raising: another error is on its way. What goes wrong here is told."""
        self.closing = True
        for line in (self._policies, self._checkpoints):
            try:
                line.wait()
            except Exception as err:
                log(f"also: {err}")

    def _put(self, line: Line, body: Callable[[], None], *, what: str) -> None:
        def named() -> None:
            with _one_line(what):
                body()

        if self._beside:
            line.put(named)
        else:
            self._agree(lambda: line.put(named))

    def _settle(self, line: Line) -> None:
        if self._beside:
            self._agree(line.wait)

    def _agree(self, body: Callable[[], None]) -> None:
        """One rank's problem is everybody's."""
        on_all(self.ranks, body)


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Errors that nobody expected end training with one line; where they come from is logged."""
    try:
        yield
    except (HpcError, OSError):
        raise
    except Exception as err:
        log(f"{what}: {traceback.format_exc().rstrip()}")
        raise OutputError(f"{what} couldn't be written: {type(err).__name__}: {err}") from err
