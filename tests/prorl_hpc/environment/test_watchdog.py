"""The watchdog's judgement, by hand-computed values."""

import dataclasses
from pathlib import Path

import pytest

from prorl_hpc.environment.base import EndReason, Limits, Stop
from prorl_hpc.environment.watchdog import DiskMeter, Usage, expired, judge, tree_bytes

LIMITS = Limits(
    memory_bytes=100, num_processes=10, disk_bytes=1000, wall_seconds=50.0, idle_seconds=5.0
)
CALM = Usage(resident_bytes=100, num_processes=10, disk_bytes=1000, free_bytes=1 << 40)


@pytest.mark.parametrize(
    ("changes", "num_disk_stops", "expected"),
    [
        ({}, 0, None),
        ({"resident_bytes": 101}, 0, Stop.memory),
        ({"num_processes": 11}, 0, Stop.processes),
        ({"disk_bytes": 1001}, 0, Stop.disk),
        ({"disk_bytes": 1001}, 1, None),  # 1000 * 11 / 10 = 1100 are allowed after one stop
        ({"disk_bytes": 1101}, 1, Stop.disk),
        ({"disk_bytes": None, "free_bytes": 0}, 0, None),
        ({"free_bytes": 0}, 0, None),  # others filled the disk: 1000 bytes are not the reason
    ],
)
def test_judge(changes: dict[str, int], num_disk_stops: int, expected: Stop | None) -> None:
    usage = dataclasses.replace(CALM, **changes)
    assert judge(usage, limits=LIMITS, num_disk_stops=num_disk_stops) is expected


def test_a_full_file_system_stops_who_filled_it() -> None:
    usage = dataclasses.replace(CALM, disk_bytes=300 << 20, free_bytes=1 << 20)
    limits = dataclasses.replace(LIMITS, disk_bytes=1 << 40)
    assert judge(usage, limits=limits) is Stop.disk  # below 256 MiB free, 300 MiB are its own


def test_expired() -> None:
    def reason(now: float, last_used: float | None) -> EndReason | None:
        return expired(now=now, started=100.0, last_used=last_used, limits=LIMITS)

    assert reason(150.0, None) is None
    assert reason(150.1, None) is EndReason.wall
    assert reason(110.0, 105.0) is None
    assert reason(110.1, 105.0) is EndReason.idle


def test_disk_is_measured_now_and_then(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"1" * 100_000)
    (tmp_path / "link").symlink_to("/usr")
    meter = DiskMeter(tmp_path, period_seconds=2.0)
    used, free = meter.read(10.0)
    assert used is not None
    assert 100_000 <= used < 300_000
    assert free > 0
    assert meter.read(11.0)[0] is None
    assert meter.read(1000.0)[0] is not None
    assert tree_bytes(tmp_path / "absent") == 0


@pytest.mark.parametrize("name", ["memory_bytes", "wall_seconds", "output_bytes"])
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=rf"limits\.{name}=0"):
        Limits(**{name: 0})
