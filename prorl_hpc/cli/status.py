"""`prorl-hpc status`: what every job of a run does, and what ails it."""

import argparse
import json
import time

from hpc.errors import HpcError
from hpc.status import JobState, Phase, states
from prorl_hpc.cli.runs import find_run
from prorl_hpc.cli.table import table
from prorl_hpc.run import Run

QUIET = (Phase.running, Phase.finished)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Jobs of a run by ledger and scheduler, the learner's step, the buffer's "
        "counts. Works with accounting off and with an unreachable controller."
    )
    parser.add_argument("run", help="name or directory of the run")
    parser.add_argument("--all", action="store_true", help="every array task, also healthy ones")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def run(args: argparse.Namespace) -> int:
    import msgspec

    run_ = find_run(args.run)
    found = states(run_)
    buffer = buffer_status(run_) if _buffer_runs(found) else None
    if args.json:
        data = {"jobs": msgspec.to_builtins(found), "buffer": buffer, "learner": progress(run_)}
        print(json.dumps(data, indent=2))
        return 0
    now = time.time()
    print(f"run {run_.name}  {run_.root}\n")
    print(jobs_table(found, now=now, every=args.all))
    print(_progress_text(run_))
    if buffer is not None:
        print(_buffer_text(buffer))
    return 0


def jobs_table(found: list[JobState], *, now: float, every: bool) -> str:
    """Healthy array tasks of one job in one row, unless `every`."""
    rows = []
    gathered: dict[tuple[str, str], list[JobState]] = {}
    for state in found:
        if not every and state.phase in QUIET:
            gathered.setdefault((state.job, state.phase.value), []).append(state)
        else:
            rows.append(_row(state, now))
    for (job, phase), group in gathered.items():
        if len(group) == 1:
            rows.append(_row(group[0], now))
        else:
            attempts = max(state.attempt for state in group)
            rows.append((job, f"{len(group)} tasks", phase, attempts, "", "", ""))
    rows.sort(key=lambda row: [state.job for state in found].index(str(row[0])))
    return table(("job", "index", "state", "attempt", "for", "host", "why"), rows)


def _row(state: JobState, now: float) -> tuple[object, ...]:
    begun = state.started
    lasted = "" if begun is None else duration((state.ended or now) - begun)
    return (
        state.job,
        str(state.index),
        state.phase.value,
        state.attempt,
        lasted,
        state.host,
        state.reason,
    )


def duration(seconds: float) -> str:
    """`3 s`, `12 min`, `5.2 h`."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def progress(run_: Run) -> dict[str, object]:
    """The learner's newest row and the resets so far."""
    from prorl_hpc.observe.history import read_history

    history = read_history(run_)
    last = history.validations[-1] if history.validations else None
    return {
        "row": history.steps[-1] if history.steps else None,
        "resets": len(history.resets),
        "validation": None if last is None else {"step": last.step, "score": last.score},
    }


def buffer_status(run_: Run) -> dict[str, object] | None:
    """The buffer's own word; None when it doesn't answer."""
    import msgspec

    from prorl_hpc.buffer.client import fetch_status, locate_buffer
    from prorl_hpc.buffer.keys import load_client_keys

    try:
        keys = load_client_keys(run_, role="observer")
        reply = fetch_status(locate_buffer(run_), keys=keys, run=run_.name, patience_seconds=5.0)
    except (HpcError, OSError):
        return None
    found = msgspec.to_builtins(reply)
    return found if isinstance(found, dict) else None


def _buffer_runs(found: list[JobState]) -> bool:
    return any(s.role in ("buffer", "learner") and s.phase is Phase.running for s in found)


def _progress_text(run_: Run) -> str:
    from prorl_hpc.observe.history import number
    from prorl_hpc.recipe import load_recipe

    found = progress(run_)
    row = found["row"]
    if not isinstance(row, dict):
        return "\nlearner: no step yet"
    steps = load_recipe(run_.recipe).steps
    parts = [f"\nlearner: step {row.get('step')}/{steps}"]
    for title, quantity in (("reward", "reward"), ("KL", "kl"), ("staleness", "staleness")):
        value = number(row, quantity)
        if value is not None:
            parts.append(f"{title} {value:.4g}")
    parts.append(f"resets {found['resets']}")
    validation = found["validation"]
    if isinstance(validation, dict):
        parts.append(f"validation {validation['score']:.3f} at step {validation['step']}")
    return ", ".join(parts)


def _buffer_text(found: dict[str, object]) -> str:
    line = (
        f"buffer: {found['phase']}, {found['groups_closed']} groups closed, "
        f"{found['groups_ready']} ready, {found['groups_open']} open, "
        f"{found['groups_dropped']} dropped, {found['workers']} rollout nodes"
    )
    counters = found.get("counters")
    if isinstance(counters, dict) and counters:
        line += "\ncounts: " + ", ".join(f"{k} {v}" for k, v in sorted(counters.items()))
    return f"{line}\nbuffer says: {found['note']}" if found.get("note") else line
