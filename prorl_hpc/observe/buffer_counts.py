"""The buffer's numbers, from its own reply or from its metrics file, as lines for people.

Reads metrics/buffer.jsonl; asks no socket, prints nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prorl_hpc.observe.metrics import last_row
from prorl_hpc.run import Run

FAILURE = "failure/"
"""Counters of rollouts that the infrastructure lost begin so, the task's name follows."""

WORDS = (
    ("late", "late"),
    ("lost", "lost with their node"),
    ("duplicate", "pushed twice"),
    ("misfit", "refused"),
    ("masked", "given up after retries"),
    ("lease_expired", "leases expired"),
    ("group_retried", "groups tried again"),
    ("fenced", "messages of replaced nodes"),
    ("back_pressure", "pushes held back"),
)
"""Counter, and what it counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferCounts:
    """One status of the buffer."""

    status: Mapping[str, Any]
    """Fields of `prorl_hpc.buffer.messages.StatusReply`."""
    age_seconds: float | None
    """None: its own word, just now."""

    def number(self, name: str) -> int:
        """A field of the status; 0 where it has none."""
        return _count(self.status.get(name))


def recorded_counts(run: Run, *, now: float) -> BufferCounts | None:
    """The newest line of the buffer's metrics file; None when it has none."""
    row = last_row(run.metrics("buffer"))
    status = None if row is None else row.get("status")
    if row is None or not isinstance(status, dict):
        return None
    time = row.get("time")
    age = now - time if isinstance(time, int | float) else 0.0
    return BufferCounts(status=status, age_seconds=max(0.0, age))


def describe_counts(counts: BufferCounts, *, ago: str = "") -> str:
    """Two to four lines: groups, rollouts that went wrong, failures by task, its own word."""
    when = f" (as of {ago} ago)" if counts.age_seconds is not None and ago else ""
    workers = counts.number("workers")
    lines = [
        (
            f"buffer{when}: {counts.status.get('phase', 'unknown')}, groups "
            f"{counts.number('groups_open')} open, {counts.number('groups_ready')} ready, "
            f"{counts.number('groups_closed')} closed, {counts.number('groups_dropped')} dropped; "
            f"{counts.number('trajectories')} rollouts stored, {counts.number('leases')} leases, "
            f"{workers} rollout node{'' if workers == 1 else 's'}"
        )
    ]
    found = counts.status.get("counters")
    counters: Mapping[str, Any] = found if isinstance(found, dict) else {}
    told = [f"{_count(counters[key])} {words}" for key, words in WORDS if _count(counters.get(key))]
    if told:
        lines.append(f"rollouts: {', '.join(told)}")
    failures = failures_by_kind(counts.status) or failures_by_task(counters)
    if failures:
        text = ", ".join(f"{task} {count}" for task, count in failures.items())
        lines.append(f"infrastructure failures: {text}")
    if counts.status.get("note"):
        lines.append(f"buffer says: {counts.status['note']}")
    return "\n".join(lines)


def failures_by_kind(status: Mapping[str, Any]) -> dict[str, int]:
    """Rollouts lost by `task: what went wrong`, the most frequent first; at most 5."""
    found = status.get("failures")
    kinds = (
        {str(key): _count(value) for key, value in found.items()} if isinstance(found, dict) else {}
    )
    ordered = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    return dict([(key, count) for key, count in ordered if count][:5])


def failures_by_task(counters: Mapping[str, Any]) -> dict[str, int]:
    """Rollouts that the infrastructure lost, the most first."""
    found = {
        key[len(FAILURE) :]: _count(value)
        for key, value in counters.items()
        if key.startswith(FAILURE) and _count(value)
    }
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
