"""What the end of an attempt means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc.attempts import Attempt, Ending, Next, decide, restart_delay_seconds, without_progress
from hpc.errors import EXIT_CONTINUE, EXIT_USER


def ending(code: int, **changes: object) -> Ending:
    values: dict[str, object] = {
        "code": code,
        "asked": "",
        "cancelled": "",
        "attempts_without_progress": 0,
        "max_attempts_without_progress": 3,
    }
    return Ending(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "changes", "expected"),
    [
        (0, {}, Next.finished),
        (0, {"cancelled": "the run was cancelled"}, Next.finished),
        (EXIT_CONTINUE, {}, Next.again),
        (EXIT_CONTINUE, {"cancelled": "the run was cancelled"}, Next.cancelled),
        (137, {}, Next.again),  # killed: by the machine, not by itself
        (139, {}, Next.failed),  # a segmentation fault is the program's own
        (1, {}, Next.failed),
        (1, {"asked": "TERM"}, Next.again),  # it was told to stop: its code says little
        (EXIT_USER, {"asked": "TERM"}, Next.failed),
        (143, {"asked": "TERM"}, Next.again),
        (EXIT_CONTINUE, {"asked": "USR2", "attempts_without_progress": 2}, Next.again),
        (EXIT_CONTINUE, {"asked": "USR2", "attempts_without_progress": 3}, Next.exhausted),
        (137, {"attempts_without_progress": 3}, Next.exhausted),
        # preemption never uses up the chain
        (EXIT_CONTINUE, {"asked": "TERM", "attempts_without_progress": 9}, Next.again),
        (EXIT_CONTINUE, {"max_attempts_without_progress": 0}, Next.failed),
    ],
)
def test_decide(code: int, changes: dict[str, object], expected: Next) -> None:
    decision = decide(ending(code, **changes))
    assert decision.next is expected
    assert decision.reason


@given(st.integers(0, 255), st.sampled_from(["", "USR2", "TERM"]))
def test_only_done_is_finished(code: int, asked: str) -> None:
    assert (decide(ending(code, asked=asked)).next is Next.finished) == (code == 0)


def test_without_progress_counts_the_latest_attempts() -> None:
    attempts = [
        Attempt(progress_at_start=1.0, asked=""),
        Attempt(progress_at_start=2.0, asked="USR2"),
        Attempt(progress_at_start=2.0, asked="TERM"),
        Attempt(progress_at_start=2.0, asked=""),
    ]
    # the preempted one doesn't count; the first began at another value
    assert without_progress(attempts, progress=2.0) == 2
    assert without_progress(attempts, progress=3.0) == 0
    assert without_progress([], progress=None) == 0


def test_back_off_is_bounded() -> None:
    delays = [restart_delay_seconds(n) for n in range(100)]
    assert delays[0] == 0.2
    assert delays == sorted(delays)
    assert delays[-1] == 30.0
