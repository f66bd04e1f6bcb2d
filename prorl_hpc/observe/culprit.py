"""How a run ended: which job was the first to fail, its last words, and what to type next.

Judges the states of the jobs; reads the end of one log file. Asks no scheduler.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from hpc.status import ALIVE, JobState, Phase
from prorl_hpc.run import Run

SUPERVISOR_GONE = "supervisor is gone"
"""How `hpc.status` says that the local backend's own process died."""

BOOKKEEPING = "prorl-hpc: attempt "
"""What every script prints at its end."""

TAIL_BYTES = 16384
WORDS = 200
"""Characters of a log's last words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """A run of which no job goes on."""

    done: bool
    failed: bool
    text: str
    """One line: what ended it, and what to type next."""
    job: str = ""
    """The culprit, where there is one."""
    index: int = 0
    attempt: int = 0


def ending(run: Run, found: Sequence[JobState]) -> Ending | None:
    """How the run ended; None while any of its jobs goes on or may."""
    if not found or any(state.phase in ALIVE and state.job_id for state in found):
        return None
    name = run.name
    first = culprit(found)
    unknown = [state for state in found if state.phase is Phase.unknown]
    dead = all(SUPERVISOR_GONE in state.reason for state in unknown)
    if not dead:  # Slurm may know more of them later
        return None
    learner = [state for state in found if state.role == "learner"]
    if learner and all(state.phase is Phase.finished for state in learner):
        text = f"done; next: prorl-hpc report {name}, or prorl-hpc export {name} DIRECTORY"
        return Ending(done=True, failed=False, text=text)
    if first is not None:
        return _failed(run, first)
    if not any(state.job_id or state.attempt for state in found):
        return Ending(
            done=False, failed=False, text="never started; next: the same prorl-hpc submit "
            "without --dry-run",
        )  # fmt: skip
    if unknown:
        reason = "the run's supervisor was killed"
    else:
        reason = next((s.reason for s in found if s.phase is Phase.cancelled), "ended")
    text = f"{reason}; next: prorl-hpc resume {name} continues it"
    return Ending(done=False, failed=False, text=text)


def culprit(found: Sequence[JobState]) -> JobState | None:
    """The job that failed first: what fails after it is often its consequence."""
    failed = [state for state in found if state.phase is Phase.failed]
    return min(failed, key=lambda state: state.ended or float("inf"), default=None)


def _failed(run: Run, state: JobState) -> Ending:
    where = f"{state.job} {state.index}" if state.index else state.job
    on = f" on {state.host}" if state.host else ""
    words = last_words(run, state)
    said = f'; it said "{words}"' if words else ""
    text = (
        f"{where} attempt {state.attempt} failed{on}: {state.reason or 'no reason known'}{said}; "
        f"next: prorl-hpc logs {run.name} {state.role} {state.index}, mend it, "
        f"prorl-hpc resume {run.name}"
    )
    return Ending(
        done=False, failed=True, text=text, job=state.job, index=state.index, attempt=state.attempt
    )


def last_words(run: Run, state: JobState) -> str:
    """Our own last message in the attempt's log, else its last line that says something."""
    directory = run.attempt_logs(state.role, index=state.index, attempt=state.attempt)
    try:
        with (directory / "out.log").open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line for raw in text.splitlines() if (line := " ".join(raw.split()))]
    lines = [line for line in lines if not line.startswith(BOOKKEEPING)]
    own = [line for line in lines if line.startswith("prorl-hpc: ")]
    words = (own or lines or [""])[-1].removeprefix("prorl-hpc: ")
    return words if len(words) <= WORDS else f"{words[: WORDS - 3]}..."
