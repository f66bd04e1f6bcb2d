"""What the learner tells people: metrics lines, TensorBoard events, its log. Rank 0 only."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from prorl_hpc.learner.checkpoint import LearnerState
from prorl_hpc.learner.reset import ResetDecision
from prorl_hpc.learner.space import SpaceWait
from prorl_hpc.learner.validate import ValidationLine, record
from prorl_hpc.observe.metrics import MetricsWriter
from prorl_hpc.run import Run


def log(message: str) -> None:
    """One line of the learner's log."""
    print(f"{time.strftime('%H:%M:%S')} learner: {message}", flush=True)


class Recorder:
    """Writes `metrics/learner.jsonl`, `metrics/validation.jsonl` and TensorBoard events."""

    def __init__(
        self, run: Run, *, space: SpaceWait | None = None, tensorboard: bool = True
    ) -> None:
        """`space`: how long lines wait while the disk is full; None: not at all."""
        self._run = run
        self._space = space
        self._lines = MetricsWriter(run.metrics("learner"))
        self._events: Any = _events(run) if tensorboard else None

    def step(
        self,
        state: LearnerState,
        metrics: Mapping[str, float],
        tasks: Mapping[str, Mapping[str, float]],
    ) -> None:
        """One trained step."""
        self._write(
            event="step",
            step=state.step,
            version=state.version,
            skipped_steps=state.skipped_steps,
            tasks={name: dict(values) for name, values in tasks.items()},
            **metrics,
        )
        flat = {f"learner/{name}": value for name, value in metrics.items()}
        flat |= {f"{task}/{n}": v for task, values in tasks.items() for n, v in values.items()}
        self._scalars(flat, state.step)
        kl = metrics.get("kl")
        log(
            f"step {state.step}: reward {metrics.get('reward', 0.0):.3f}, "
            f"{'' if kl is None else f'kl {kl:.4f}, '}"
            f"staleness {metrics.get('staleness', 0.0):.1f}, "
            f"{metrics.get('groups_trained', 0):.0f} of "
            f"{metrics.get('groups_seen', 0):.0f} groups, "
            f"{metrics.get('step_seconds', 0.0):.1f} s"
        )

    def validation(self, line: ValidationLine) -> None:
        """One validated version."""
        self._patiently(lambda: record(self._run.validation, line))
        self._write(
            event="validation",
            step=line.step,
            version=line.version,
            score=line.score,
            tasks={
                name: {"reward": r.reward, "solved": r.solved} for name, r in line.tasks.items()
            },
            seconds=line.seconds,
            note=line.note,
        )
        if line.score is not None:
            self._scalars({"validation/score": line.score}, line.step)
        score = "none" if line.score is None else f"{line.score:.3f}"
        log(f"validation of version {line.version}: {score} {line.note}".rstrip())

    def reset(self, decision: ResetDecision) -> None:
        """The reference (and maybe the optimizer) was reset."""
        self._write(
            event="reset",
            step=decision.step,
            reset_index=decision.reset_index,
            trigger=str(decision.trigger),
            reason=decision.reason,
            reset_optimizer=decision.reset_optimizer,
            roll_back_step=decision.roll_back_step,
        )
        self._scalars({"learner/reset_index": float(decision.reset_index)}, decision.step)
        log(f"reference reset {decision.reset_index} at step {decision.step}: {decision.reason}")

    def warmup(self, step: int, loss: float) -> None:
        """A supervised step before reinforcement learning."""
        self._write(event="warmup", step=step, loss=loss)

    def event(self, name: str, **values: object) -> None:
        """Anything else worth a line."""
        self._write(event=name, **values)

    def close(self) -> None:
        """Flushes and closes."""
        self._lines.close()
        if self._events is not None:
            with suppress(OSError):
                self._events.close()

    def _write(self, **values: object) -> None:
        self._patiently(lambda: self._lines.write(**values))

    def _patiently(self, body: Callable[[], None]) -> None:
        if self._space is None:
            body()
        else:
            self._space.write("a line of metrics", body)

    def _scalars(self, values: Mapping[str, float], step: int) -> None:
        if self._events is None:
            return
        try:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
            self._events.flush()
        except OSError as err:
            # Its writer is of no use after an error; the JSON lines hold the same numbers.
            log(f"TensorBoard events end here: {err}")
            self._events = None


def _events(run: Run) -> Any:
    """TensorBoard's writer; None where tensorboard isn't installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log("tensorboard isn't installed; metrics go to the JSON lines only")
        return None
    return SummaryWriter(str(run.tensorboard))
