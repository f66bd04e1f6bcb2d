"""The ledger: torn lines, newer formats, folding, index lists."""

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc import ledger
from hpc.errors import LedgerError


def start(attempt: int, index: int = 0) -> ledger.Start:
    return ledger.Start(
        time=1.0, job="rollout", role="rollout", index=index, attempt=attempt, job_id="7", host="h"
    )


def exit_of(attempt: int, following: str = "again") -> ledger.Exit:
    return ledger.Exit(
        time=2.0, job="rollout", index=0, attempt=attempt, code=75, next=following, reason="r"
    )


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    entries = (
        ledger.Intent(time=1.0, job="a", token="t", script="a.sbatch"),
        ledger.Submit(time=1.0, job="a", token="t", job_id="9", indexes="0-3", index_offset=0),
        start(1),
        ledger.Heartbeat(time=1.0, job="rollout", index=0, attempt=1),
        exit_of(1),
        ledger.Requeue(time=1.0, job="rollout", index=0, attempt=1, job_id="9", how="requeue"),
        ledger.Cancel(time=1.0, job="rollout", reason="by the user"),
        ledger.Resume(time=1.0, job="rollout"),
    )
    for entry in entries:
        ledger.append(path, entry=entry)
    assert ledger.read(path) == ledger.Ledger(entries=entries, damaged_lines=0)
    assert all('"format":1' in line for line in path.read_text().splitlines())


def test_absent_ledger_is_empty(tmp_path: Path) -> None:
    assert ledger.read(tmp_path / "none").entries == ()


def test_torn_line_is_skipped_and_not_joined(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger.append(path, entry=start(1))
    with path.open("ab") as stream:
        stream.write(b'{"kind":"start","time":1.0,"jo')
    ledger.append(path, entry=start(2))
    found = ledger.read(path)
    assert [entry.attempt for entry in found.entries if isinstance(entry, ledger.Start)] == [1, 2]
    assert found.damaged_lines == 1


@pytest.mark.parametrize("kind", ["start", "of-tomorrow"])
def test_newer_format_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger.append(path, entry=start(1))
    text = path.read_text().replace('"format":1', '"format":2')
    path.write_text(text.replace('"kind":"start"', f'"kind":"{kind}"'))
    with pytest.raises(LedgerError, match="format 2, newer than 1"):
        ledger.read(path)


def test_lines_of_many_writers_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"

    def write(index: int) -> None:
        for attempt in range(20):
            ledger.append(path, entry=start(attempt, index))

    threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = ledger.read(path)
    assert len(found.entries) == 80
    assert found.damaged_lines == 0


def test_fold(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for entry in (start(1), exit_of(1), start(2), start(1, index=3)):
        ledger.append(path, entry=entry)
    ledger.append(path, entry=ledger.Cancel(time=3.0, job="rollout", indexes="3-4"))
    histories = ledger.fold(ledger.read(path))
    first = histories["rollout", 0]
    assert first.last_start == start(2)
    assert first.last_exit is None  # attempt 2 hasn't ended
    assert histories["rollout", 3].cancelled
    assert histories["rollout", 4].cancelled
    ledger.append(path, entry=ledger.Resume(time=4.0, job="rollout", indexes="3"))
    assert not ledger.fold(ledger.read(path))["rollout", 3].cancelled


@given(st.sets(st.integers(0, 200), min_size=1))
def test_index_lists_round_trip(indexes: set[int]) -> None:
    assert ledger.parse_indexes(ledger.format_indexes(list(indexes))) == tuple(sorted(indexes))


def test_index_list_by_hand() -> None:
    assert ledger.format_indexes([5, 0, 1, 2]) == "0-2,5"
    assert ledger.parse_indexes(None) == (0,)
