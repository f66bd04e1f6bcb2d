"""Policies, exports and checkpoints on their way to the disk. Knows files and ranks; no buffer.

    tensors --copy to main memory (the pause)--> thread: write, hash, fsync, rename, tell

At most one policy and one checkpoint are under way; the next one waits for its predecessor. What
went wrong is raised on every rank when it is waited for. A crash in between leaves the checkpoint
and the policy before: names appear only when all their bytes are on disk.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from prorl_hpc.learner.background import Line
from prorl_hpc.learner.checkpoint import (
    LearnerState,
    keep_last,
    save_checkpoint,
    snapshot,
    write_checkpoint,
)
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.model import PolicyModel, gather_weights
from prorl_hpc.learner.publish import write_export, write_version
from prorl_hpc.learner.reference import Reference
from prorl_hpc.recipe import LearnerConfig
from prorl_hpc.run import Run


@dataclass(kw_only=True, slots=True)
class Outputs:
    """What the loop writes, beside training unless the mode is deterministic."""

    run: Run
    config: LearnerConfig
    ranks: Ranks
    _policies: Line = field(init=False)
    _checkpoints: Line = field(init=False)

    def __post_init__(self) -> None:
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

        def write() -> None:
            if publish:
                keep = self.config.keep_policies
                write_version(self.run, weights, version=version, step=step, keep=keep)
                then()
            if export:
                target = self.run.root / "export" / f"step-{step:08d}"
                write_export(self.run, weights, version=version, step=step, target=target)

        self._put(self._policies, write if self.ranks.is_first else lambda: None)

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

        def write() -> None:
            if copied is None:
                save_checkpoint(
                    self.run,
                    state,
                    model=model,
                    optimizer=optimizer,
                    reference=reference,
                    ranks=self.ranks,
                )
            else:
                write_checkpoint(self.run, state, copied, ranks=self.ranks.beside())
            if self.ranks.is_first:
                keep_last(self.run, self.config.keep_checkpoints, protect=(best,))
                then()

        self._put(self._checkpoints, write)

    def settle(self) -> None:
        """Returns when all is on disk. Raises OSError on every rank when something isn't."""
        self._settle(self._policies)
        self._settle(self._checkpoints)

    def close(self) -> None:
        """Waits without raising: another error is on its way."""
        for line in (self._policies, self._checkpoints):
            _problem(line.wait)

    def _put(self, line: Line, body: Callable[[], None]) -> None:
        if self._beside:
            line.put(body)
        else:
            self._agree(_problem(lambda: line.put(body)))

    def _settle(self, line: Line) -> None:
        if self._beside:
            self._agree(_problem(line.wait))

    def _agree(self, mine: OSError | None) -> None:
        """One rank's problem is everybody's."""
        problems = self.ranks.gather(None if mine is None else str(mine))
        if mine is not None:
            raise mine
        found = next((problem for problem in problems if problem is not None), None)
        if found is not None:
            raise OSError(found)


def _problem(body: Callable[[], None]) -> OSError | None:
    try:
        body()
    except OSError as err:
        return err
    return None
