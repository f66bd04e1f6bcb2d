"""Closed groups as JSON lines (or Parquet where pyarrow is there). Reads shards, writes one file.

One record per usable trajectory, with its tokens, mask, log-probabilities and versions.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hpc.errors import UserError
from hpc.files import publish_with
from prorl_hpc.buffer.groups import reference
from prorl_hpc.buffer.manifest import Closed, Merged, Moves, Quarantined, valid_lines
from prorl_hpc.buffer.reader import GroupReader
from prorl_hpc.records import Kind, Trajectory
from prorl_hpc.run import Run

ROWS_PER_BATCH = 256


class ExportError(UserError, RuntimeError):
    """What was asked for can't be written."""


def closed_groups(run: Run, *, kind: Kind | None = None) -> list[Closed]:
    """The groups' newest closing records, in the order of their ids, without lost ones."""
    lost: set[int] = set()
    groups: dict[int, Closed] = {}
    moves = Moves()
    for line in valid_lines(run.manifest):
        if isinstance(line, Closed):
            groups[line.group] = line
        elif isinstance(line, Quarantined):
            lost.add(line.number)
        elif isinstance(line, Merged):
            moves.add(line)
    return [
        line
        for line in (moves.of(groups[group_id]) for group_id in sorted(groups))
        if (kind is None or line.kind is kind) and not any(line.touches(n) for n in lost)
    ]


def records(run: Run, *, kind: Kind | None = None) -> Iterator[dict[str, Any]]:
    """One plain record per trajectory. Raises ShardDamaged, ManifestError."""
    reader = GroupReader(run)
    try:
        for line in closed_groups(run, kind=kind):
            for trajectory in reader.read(reference(line)).trajectories:
                yield _record(trajectory)
    finally:
        reader.close()


def export(run: Run, path: Path, *, kind: Kind | None = None) -> int:
    """Writes `path` (`.jsonl` or `.parquet`), atomically; returns the number of trajectories."""
    writers = {".jsonl": _write_jsonl, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise ExportError(f"path={str(path)!r}: name a .jsonl or .parquet file")
    count = 0

    def write(temporary: Path) -> None:
        nonlocal count
        count = writers[path.suffix](temporary, records(run, kind=kind))

    publish_with(path, write=write)
    return count


def _record(t: Trajectory) -> dict[str, Any]:
    return {
        "group_id": t.group_id,
        "rollout_index": t.rollout_index,
        "kind": t.kind.value,
        "task": t.task,
        "instance_id": t.instance_id,
        "reward": t.reward,
        "outcome": t.outcome.value,
        "finish_reason": t.finish_reason,
        "components": t.components,
        "timings": t.timings,
        "isolation": t.isolation,
        "worker": t.worker,
        "attempt": t.attempt,
        "detail": t.detail,
        "tokens": t.tokens.tolist(),
        "loss_mask": t.loss_mask.tolist(),
        # JSON has no NaN or infinity: what the sampler said in such a place is null.
        "logprobs": [x if math.isfinite(x) else None for x in t.logprobs.tolist()],
        "versions": t.versions.tolist(),
    }


def _write_jsonl(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    count = 0
    encoder = msgspec.json.Encoder()
    with path.open("wb") as stream:
        for count, row in enumerate(rows, start=1):  # noqa: B007
            stream.write(encoder.encode(row) + b"\n")
    return count


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as err:
        raise ExportError("Parquet needs pyarrow; `pip install pyarrow`, or name .jsonl") from err
    count = 0
    writer: Any = None
    try:
        for batch in _batches(rows):
            for row in batch:
                for name in ("components", "timings", "isolation"):
                    row[name] = msgspec.json.encode(row[name]).decode()
            table = pyarrow.Table.from_pylist(batch, schema=_schema(pyarrow))
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
            count += len(batch)
        if writer is None:
            parquet.write_table(_schema(pyarrow).empty_table(), path)
    finally:
        if writer is not None:
            writer.close()
    return count


def _batches(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == ROWS_PER_BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _schema(pyarrow: Any) -> Any:
    integers = {"group_id": "int64", "rollout_index": "int32", "attempt": "int32"}
    lists = {"tokens": "int32", "loss_mask": "uint8", "logprobs": "float32", "versions": "int32"}
    texts = ["kind", "task", "instance_id", "outcome", "finish_reason", "worker", "detail"]
    texts += ["components", "timings", "isolation"]
    return pyarrow.schema(
        [(name, getattr(pyarrow, kind)()) for name, kind in integers.items()]
        + [("reward", pyarrow.float64())]
        + [(name, pyarrow.string()) for name in texts]
        + [(name, pyarrow.list_(getattr(pyarrow, kind)())) for name, kind in lists.items()]
    )
