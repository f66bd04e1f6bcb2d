"""Metrics as JSON lines, one file per role: writer, reader, follower. Knows no metric by name.

A line is one JSON object with `time` (seconds since the epoch). Values that JSON can't hold (NaN,
infinities) become null. A line torn by a crash is skipped by the reader, never an error.
"""

import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

Row = dict[str, Any]
"""One line: numbers, strings, booleans, null, or a mapping of these (per task)."""


class MetricsWriter:
    """Appends rows to one file. Safe from several threads; one writer per file."""

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._now = now
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._descriptor = os.open(path, flags, 0o644)
        self._end_torn_line()

    def write(self, **values: object) -> None:
        """Appends one row; raises OSError when the disk refuses it, ValueError after `close`."""
        row = {"time": round(self._now(), 3)} | {k: _plain(v) for k, v in values.items()}
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self._descriptor < 0:
                raise ValueError(f"metrics file {self._path} is closed")
            before = os.fstat(self._descriptor).st_size
            if os.write(self._descriptor, line) < len(line):
                os.ftruncate(self._descriptor, before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_torn_line(self) -> None:
        """What an attempt that was killed left unfinished gets a line of its own."""
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")


def read_metrics(path: Path) -> list[Row]:
    """All whole rows of the file in order; none when it doesn't exist yet."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return [row for line in data.split(b"\n") if (row := _decode(line)) is not None]


def last_row(path: Path, *, event: str | None = None, tail_bytes: int = 65536) -> Row | None:
    """The newest whole row (of that event), read from the file's end only; None without one."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            start = stream.seek(max(0, size - tail_bytes))
            lines = stream.read().split(b"\n")
    except FileNotFoundError:
        return None
    # The last part is empty or still being written; the first may be cut in the middle.
    for line in reversed(lines[1 if start else 0 : -1]):
        row = _decode(line)
        if row is not None and event in (None, row.get("event")):
            return row
    return None


class MetricsTail:
    """Reads what was added to a file since the last look. The file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Row]:
        """Rows added since the last call; a line still being written waits for the next one."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [row for line in whole.split(b"\n") if (row := _decode(line)) is not None]


def follow_metrics(
    path: Path,
    *,
    stop: Callable[[], bool],
    poll_seconds: float = 0.5,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Row]:
    """Yields rows as they come, old ones first, until `stop()` holds and the file is read out."""
    tail = MetricsTail(path)
    while True:
        last = stop()
        yield from tail.read()
        if last:
            return
        sleep(poll_seconds)


def _decode(line: bytes) -> Row | None:
    if not line.strip():
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        # str and int enums and numpy scalars that subclass float end here as well
        number = int(value) if isinstance(value, int) else float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    item = getattr(value, "item", None)
    if callable(item):  # numpy and torch scalars
        return _plain(item())
    return str(value)
