"""The rows of a user's file: JSON lines or Parquet. Knows nothing of what rows mean."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from prorl_hpc.tasks.base import TaskError

Row = dict[str, Any]

JSON_LINES = (".jsonl", ".json", ".ndjson")


def read_rows(name: str, path: Path) -> Iterator[tuple[str, Row]]:
    """(where it stands, the row), in order. Raises TaskError naming the line that can't be read."""
    if path.suffix == ".parquet":
        return _parquet_rows(name, path)
    if path.suffix in JSON_LINES:
        return _json_rows(name, path)
    raise TaskError(
        f"tasks.{name}.data={str(path)!r} is neither JSON lines (.jsonl) nor Parquet (.parquet); "
        "convert it"
    )


def _json_rows(name: str, path: Path) -> Iterator[tuple[str, Row]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as err:
        raise TaskError(f"tasks.{name}.data={str(path)!r} can't be read: {err.strerror}") from err
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield f"line {number}", msgspec.json.decode(line, type=Row)
            except ValueError as err:
                raise TaskError(f"tasks.{name}: {path} line {number}: {err}") from err


def _parquet_rows(name: str, path: Path) -> Iterator[tuple[str, Row]]:
    try:
        from pyarrow import parquet
    except ImportError as err:
        raise TaskError(
            f"tasks.{name}.data={str(path)!r} is Parquet, which needs pyarrow: pip install pyarrow "
            "(or convert it to .jsonl)"
        ) from err
    try:
        with parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"row {number}", row
    except (OSError, ValueError) as err:
        raise TaskError(f"tasks.{name}.data={str(path)!r} can't be read: {err}") from err
