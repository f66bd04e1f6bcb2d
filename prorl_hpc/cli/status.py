"""`prorl-hpc status`: what every job of a run does, and what ails it."""

import argparse
import json
import time

from hpc.errors import HpcError
from hpc.status import JobState, Phase, states
from prorl_hpc.cli.runs import find_run
from prorl_hpc.cli.table import table
from prorl_hpc.run import Run

EXIT_FAILED = 1
"""The run has ended, and failed."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Jobs of a run by ledger and scheduler, the learner's step, the buffer's "
        "counts, and how it ended. Exit code 1 when it has failed. Works with accounting off and "
        "with an unreachable controller."
    )
    parser.add_argument("run", help="name or directory of the run")
    parser.add_argument("--all", action="store_true", help="a row for every array task")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def run(args: argparse.Namespace) -> int:
    import msgspec

    from prorl_hpc.inference.announce import beating, describe
    from prorl_hpc.observe.buffer_counts import BufferCounts, describe_counts, recorded_counts
    from prorl_hpc.observe.culprit import ending

    run_ = find_run(args.run, beginning=True)
    found = states(run_)
    now = time.time()
    live = buffer_status(run_) if _buffer_runs(found) else None
    counts = recorded_counts(run_, now=now)
    if live is not None:
        counts = BufferCounts(status=live, age_seconds=None)
    servers = beating(run_, now=now)
    end = ending(run_, found)
    code = EXIT_FAILED if end is not None and end.failed else 0
    if args.json:
        data = {
            "jobs": msgspec.to_builtins(found),
            "buffer": None
            if counts is None
            else {**counts.status, "age_seconds": counts.age_seconds},
            "learner": progress(run_),
            "servers": msgspec.to_builtins(servers),
            "ending": None if end is None else msgspec.to_builtins(end),
        }
        print(json.dumps(data, indent=2))
        return code
    print(f"run {run_.name}  {run_.root}\n")
    print(jobs_table(found, now=now, every=args.all))
    print(_progress_text(run_))
    if counts is not None:
        print(describe_counts(counts, ago=duration(counts.age_seconds or 0.0)))
    if any(state.role == "inference" and state.phase is Phase.running for state in found):
        print(describe(servers))
    if end is not None:
        print(f"\nend: {end.text}")
    return code


def jobs_table(found: list[JobState], *, now: float, every: bool) -> str:
    """Array tasks of one job of which the same is to be said in one row, unless `every`.

    Failed ones stand alone: their hosts matter.
    """
    rows = []
    gathered: dict[tuple[str, str, str], list[JobState]] = {}
    for state in found:
        if every or state.phase is Phase.failed:
            rows.append(_row(state, now))
        else:
            key = (state.job, state.phase.value, state.reason)
            gathered.setdefault(key, []).append(state)
    for (job, phase, reason), group in gathered.items():
        if len(group) == 1:
            rows.append(_row(group[0], now))
        else:
            attempts = max(state.attempt for state in group)
            rows.append((job, f"{len(group)} tasks", phase, attempts, "", "", reason))
    order = {job: place for place, job in enumerate(dict.fromkeys(state.job for state in found))}
    rows.sort(key=lambda row: order[str(row[0])])
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
        return f"\nlearner: {_before_steps(run_)}"
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


def _before_steps(run_: Run) -> str:
    """What a learner without a step does, by its newest row."""
    from prorl_hpc.observe.dashboard import warmup_line
    from prorl_hpc.observe.metrics import last_row
    from prorl_hpc.recipe import load_recipe

    row = last_row(run_.metrics("learner"), event="warmup")
    steps = load_recipe(run_.recipe).warmup.steps
    line = None if row is None else warmup_line(row, steps=steps)
    return "no step yet" if line is None else f"no step yet, {' '.join(line.split())}"
