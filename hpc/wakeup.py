"""Sleeping until a signal comes or time is up, without polling. Main thread only."""

import os
import select
import signal
from types import FrameType, TracebackType
from typing import Self


class Wakeup:
    """Catches signals while its block runs; `wait` returns their numbers."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, _nothing) for number in self._numbers}
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, seconds: float) -> list[int]:
        """Signals that came; empty when `seconds` (may be infinite or negative) went by."""
        timeout = None if seconds == float("inf") else max(0.0, seconds)
        ready, _, _ = select.select([self._reader], [], [], timeout)
        return list(os.read(self._reader, 4096)) if ready else []


def _nothing(number: int, frame: FrameType | None) -> None:
    """The number arrives through the pipe."""
