"""Metrics files: round trip, torn lines, following."""

from pathlib import Path

import numpy as np
import pytest

from prorl_hpc.observe.metrics import (
    MetricsTail,
    MetricsWriter,
    follow_metrics,
    last_row,
    read_metrics,
)


def test_rows_come_back_with_their_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "learner.jsonl"
    with MetricsWriter(path, now=lambda: 12.5) as writer:
        writer.write(step=1, reward=0.5, task="sums", per_task={"sums": 0.25})
        writer.write(step=np.int64(2), reward=np.float32(0.5), stage=None)
    assert read_metrics(path) == [
        {"time": 12.5, "step": 1, "reward": 0.5, "task": "sums", "per_task": {"sums": 0.25}},
        {"time": 12.5, "step": 2, "reward": 0.5, "stage": None},
    ]


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(kl=float("nan"), loss=float("inf"), values=[1.0, float("-inf")])
    row = read_metrics(path)[0]
    assert (row["kl"], row["loss"], row["values"]) == (None, None, [1.0, None])


def test_torn_line_of_a_killed_attempt_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2,"rew')
    assert read_metrics(path) == [{"step": 1}]
    with MetricsWriter(path) as writer:
        writer.write(step=3)
    assert [row["step"] for row in read_metrics(path)] == [1, 3]


def test_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []
    assert last_row(tmp_path / "none.jsonl") is None


def test_last_row_reads_only_the_end(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(100):
            writer.write(step=step)
    row = last_row(path, tail_bytes=200)
    assert row is not None
    assert row["step"] == 99


def test_closed_writer_refuses(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(step=1)


def test_tail_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_bytes(b'{"step":1}\n{"st')
    assert tail.read() == [{"step": 1}]
    with path.open("ab") as stream:
        stream.write(b'ep":2}\n')
    assert tail.read() == [{"step": 2}]


def test_follow_reads_out_before_it_stops(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    looks = iter([False, True])

    def sleep(_seconds: float) -> None:
        path.write_bytes(b'{"step":1}\n')

    rows = follow_metrics(path, stop=lambda: next(looks), sleep=sleep)
    assert [row["step"] for row in rows] == [1]
