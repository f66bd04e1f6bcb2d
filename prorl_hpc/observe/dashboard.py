"""Live progress as lines of text. Pure: rows in, lines out; reads no file, knows no terminal."""

from prorl_hpc.observe.history import number, reset_of, validation_of
from prorl_hpc.observe.metrics import Row

COLUMNS = (
    ("stage", 10),
    ("step", 11),
    ("reward", 7),
    ("KL", 8),
    ("stale", 6),
    ("groups/s", 8),
    ("tokens/s", 8),
)


def header() -> str:
    """Titles of the columns of `step_line`."""
    return "  ".join(title.rjust(width) for title, width in COLUMNS)


def step_line(row: Row, *, steps: int) -> str:
    """One trained step."""
    cells = (
        "train",
        f"{row.get('step', '-')}/{steps}",
        _number(number(row, "reward"), ".3f"),
        _number(number(row, "kl"), ".4f"),
        _number(number(row, "staleness"), ".2f"),
        _number(number(row, "groups_per_second"), ".1f"),
        _number(number(row, "tokens_per_second"), ".0f"),
    )
    return "  ".join(cell.rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True))


def warmup_line(row: Row, *, steps: int) -> str | None:
    """A supervised step before reinforcement learning; None for other rows."""
    step = row.get("step")
    if row.get("event") != "warmup" or not isinstance(step, int):
        return None
    loss = number(row, "loss")
    told = "" if loss is None else f": loss {loss:.3f} nats per token"
    return f"{'warmup':>10}  step {step}/{steps}{told}"


def reset_line(row: Row) -> str | None:
    """A reset of the reference policy; None for other rows."""
    found = reset_of(row)
    if found is None:
        return None
    return f"{'reset':>10}  step {found.step}: the reference is the policy now: {found.reason}"


def validation_line(row: Row) -> str | None:
    """One line of validation.jsonl; None when it holds no score."""
    found = validation_of(row)
    if found is None:
        return None
    tasks = ", ".join(f"{name} {score:.3f}" for name, score in sorted(found.by_task.items()))
    return f"{'validation':>10}  step {found.step}: {found.score:.3f}" + (
        f" ({tasks})" if len(found.by_task) > 1 else ""
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
