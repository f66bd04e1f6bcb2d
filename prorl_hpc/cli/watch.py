"""`prorl-hpc watch`: live progress from the metrics files and the states of the jobs."""

import argparse
import math
import random
import time
from dataclasses import dataclass, field

from hpc.local import supervisor_pid
from hpc.site import Backend
from hpc.status import ALIVE, JobState, Phase, states, trouble
from prorl_hpc.cli.runs import find_run
from prorl_hpc.observe.culprit import ending
from prorl_hpc.observe.dashboard import (
    header,
    reset_line,
    step_line,
    validation_line,
    warmup_line,
)
from prorl_hpc.observe.history import is_step
from prorl_hpc.observe.metrics import MetricsTail, Row
from prorl_hpc.recipe import Recipe, load_recipe, site_of
from prorl_hpc.run import Run

POLL_SECONDS = 0.5
LOCAL_STATES_SECONDS = 2.0
SLURM_STATES_SECONDS = 60.0
LONGEST_PACE_SECONDS = 600.0
"""While the controller doesn't answer."""

HEADER_LINES = 25


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Live progress: stage, step, reward, KL, staleness, groups/s, validation, "
        "resets. Ctrl-C stops watching; the run goes on."
    )
    parser.add_argument("run", help="name or directory of the run")
    parser.add_argument("--from-now", action="store_true", help="leave out what happened already")
    return parser


def run(args: argparse.Namespace) -> int:
    return follow(find_run(args.run, beginning=True), from_now=args.from_now)


def follow(run_: Run, *, quiet: bool = False, from_now: bool = False) -> int:
    """Prints progress until the run ends: 0 when its learner finished, else 1 with the reason."""
    recipe = load_recipe(run_.recipe)
    local = site_of(recipe).backend is Backend.local
    pace = Pace(seconds=LOCAL_STATES_SECONDS if local else SLURM_STATES_SECONDS)
    printer = _Printer(recipe=recipe, run=run_, quiet=quiet)
    if from_now:
        printer.skip()
    while True:
        found: list[JobState] | None = None
        if pace.due(time.monotonic()):
            found = states(run_)
            pace.asked(time.monotonic(), answered=not trouble(found))
        printer.rows()
        if found is not None:
            printer.jobs(found)
            if is_over(found, local=local, supervised=local and supervisor_pid(run_) is not None):
                printer.rows()
                return verdict(run_, found)
        time.sleep(POLL_SECONDS)


@dataclass(kw_only=True, slots=True)
class Pace:
    """When the scheduler is asked again: many watches don't ask in step, and the longer a busy
    controller gives no answer, the seldomer."""

    seconds: float
    rng: random.Random = field(default_factory=random.Random)
    _due: float = -math.inf
    _failures: int = 0

    def due(self, now: float) -> bool:
        return now >= self._due

    def asked(self, now: float, *, answered: bool) -> None:
        self._failures = 0 if answered else self._failures + 1
        wait = min(self.seconds * 2**self._failures, max(self.seconds, LONGEST_PACE_SECONDS))
        self._due = now + wait * self.rng.uniform(0.75, 1.25)


def is_over(found: list[JobState], *, local: bool, supervised: bool = False) -> bool:
    """Whether nothing of the run is going to happen any more.

    On Slurm an unknown job may come back into sight, so the watch goes on. What nobody submitted
    comes only where a supervisor lives that is about to.
    """
    going = ALIVE if local else (*ALIVE, Phase.unknown)
    if any(state.phase in going and (state.job_id or state.attempt) for state in found):
        return False
    return not supervised


def verdict(run_: Run, found: list[JobState]) -> int:
    """Prints how the run ended; 0 when the learner finished its work."""
    end = ending(run_, found)
    if end is not None:
        print(f"run {run_.name}: {end.text}")
        return 0 if end.done else 1
    for state in found:
        if state.phase is not Phase.finished:
            where = f"{state.job} {state.index}" if state.index else state.job
            print(f"{where}: {state.phase.value}: {state.reason or 'no reason known'}")
    print(f"see prorl-hpc logs {run_.name} ROLE; prorl-hpc resume {run_.name} goes on")
    return 1


@dataclass(kw_only=True, slots=True)
class _Printer:
    """Prints new rows once, with titles now and then."""

    recipe: Recipe
    run: Run
    quiet: bool
    _learner: MetricsTail = field(init=False)
    _validation: MetricsTail = field(init=False)
    _lines: int = 0
    _warms: bool = False
    _jobs: str = ""

    def __post_init__(self) -> None:
        self._learner = MetricsTail(self.run.metrics("learner"))
        self._validation = MetricsTail(self.run.validation)
        self._warms = self.recipe.warmup.steps > 0

    def skip(self) -> None:
        self._learner.read()
        self._validation.read()

    def rows(self) -> None:
        for row in self._learner.read():
            self._learner_row(row)
        for row in self._validation.read():
            line = validation_line(row)
            if line is not None:
                self._say(line)

    def jobs(self, found: list[JobState]) -> None:
        """One line whenever the jobs' states changed."""
        line = summary(found)
        if line != self._jobs:
            self._jobs = line
            self._say(f"{'jobs':>10}  {line}")
        learns = any(s.role == "learner" and s.phase is Phase.running for s in found)
        if learns and self._warms and not self.run.model_start.exists():
            self._warms = False
            steps = self.recipe.warmup.steps
            self._say(f"{'warmup':>10}  {steps} supervised steps before reinforcement learning")

    def _learner_row(self, row: Row) -> None:
        other = reset_line(row) or warmup_line(row, steps=self.recipe.warmup.steps)
        if other is not None:
            self._warms = False
            self._say(other)
        elif is_step(row):
            if self._lines % HEADER_LINES == 0:
                self._say(header())
            self._lines += 1
            self._say(step_line(row, steps=self.recipe.steps))

    def _say(self, line: str) -> None:
        if not self.quiet:
            print(line, flush=True)


def summary(found: list[JobState]) -> str:
    """`buffer running, rollout 2 running 1 pending, learner running`."""
    words: dict[str, dict[str, int]] = {}
    for state in found:
        counts = words.setdefault(state.job, {})
        counts[state.phase.value] = counts.get(state.phase.value, 0) + 1
    parts = []
    for job, counts in words.items():
        many = sum(counts.values()) > 1
        told = " ".join(f"{n} {phase}" if many else phase for phase, n in sorted(counts.items()))
        parts.append(f"{job} {told}")
    return ", ".join(parts)
