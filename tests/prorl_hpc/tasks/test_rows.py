"""Files of rows: JSON lines and Parquet, good and bad."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind
from prorl_hpc.tasks.base import TaskError
from prorl_hpc.tasks.registry import make_task
from prorl_hpc.tasks.rows import read_rows

ROWS = [{"problem": f"{n} + {n}?", "answer": str(2 * n)} for n in range(5)]


def test_parquet_and_json_lines_hold_the_same_rows(tmp_path):
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    lines.write_text("\n\n".join(json.dumps(row) for row in ROWS))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), table, row_group_size=2)
    assert [row for _, row in read_rows("t", lines)] == ROWS
    assert list(read_rows("t", table)) == [(f"row {n}", row) for n, row in enumerate(ROWS, 1)]


def test_a_parquet_file_is_a_task(tmp_path):
    table = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), table)
    task = make_task("t", TaskConfig(kind="math", data=str(table), validation_size=2), 0)
    assert (task.size(Kind.train), task.size(Kind.validation)) == (3, 2)


def test_a_bad_row_of_a_parquet_file_is_named(tmp_path):
    table = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([*ROWS, {"problem": "x", "answer": None}]), table)
    with pytest.raises(TaskError, match=r"a\.parquet row 6: answer"):
        make_task("t", TaskConfig(kind="math", data=str(table), validation_size=2), 0)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.csv", b"", r"neither JSON lines \(\.jsonl\) nor Parquet"),
        ("a.parquet", b"no table", "can't be read: "),
        ("none.parquet", None, "can't be read: "),
        ("none.jsonl", None, "can't be read: No such file"),
        ("a.jsonl", b"[1]\n", "line 1: "),
        ("a.jsonl", b'{"a": 1}\n{', "line 2: "),
    ],
)
def test_files_that_hold_no_rows(tmp_path, name, content, complaint):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match=complaint):
        list(read_rows("t", tmp_path / name))
