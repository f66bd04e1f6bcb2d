"""Control groups: which are ours by the kernel's own words, and a real one where we may make it.

Version 2 and systemd's scopes are checked by their files and command lines: that is all a machine
without them allows. `tests/cluster/test_environment.py` runs sandboxes in delegated groups.
"""

import os
import subprocess
import time
from pathlib import Path

import pytest

from hpc.cgroups import (
    RUNTIME_BYTES,
    GroupPlace,
    enter_script,
    find_places,
    find_scope_runner,
    group_paths,
    make_group,
    num_oom_kills,
    probe_place,
    scope_argv,
    works,
)

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 25 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 25 0:28 /docker/ab /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
    "33 25 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)


def test_version_2_looks_upwards_from_the_own_group() -> None:
    own = "0::/user.slice/user@7.service/app.slice/run.scope\n"
    found = [str(place.directories[0]) for place in find_places(own, V2_MOUNT)]
    assert found == [
        "/sys/fs/cgroup/user.slice/user@7.service/app.slice/run.scope",
        "/sys/fs/cgroup/user.slice/user@7.service/app.slice",
        "/sys/fs/cgroup/user.slice/user@7.service",
        "/sys/fs/cgroup/user.slice",
        "/sys/fs/cgroup",
    ]


def test_version_1_stays_below_the_own_group() -> None:
    own = "5:pids:/docker/ab/job\n4:memory:/slurm/job_1\n1:cpu,cpuacct:/\n0::/\n"
    found = find_places(own, V1_MOUNTS)
    assert [place.version for place in found] == [2, 1]
    assert found[-1].directories == (
        Path("/sys/fs/cgroup/memory/slurm/job_1"),
        Path("/sys/fs/cgroup/pids/job"),  # the mount begins at /docker/ab
    )
    assert find_places("4:memory:/\n", V1_MOUNTS) == []
    assert find_places(own, "") == []


def test_limits_of_version_2_are_written(tmp_path: Path) -> None:
    """On plain directories: the file names and values, not the kernel's answer."""
    place = GroupPlace(version=2, directories=(tmp_path,))
    (group,) = groups = group_paths(place, "one")
    make_group(place, groups, memory_bytes=1000, num_processes=7)
    assert (group / "memory.max").read_text() == str(1000 + RUNTIME_BYTES)
    assert (group / "pids.max").read_text() == "7"
    (group / "memory.events").write_text("low 0\nmax 3\noom 2\noom_kill 2\noom_group_kill 1\n")
    assert num_oom_kills(groups) == 2
    assert num_oom_kills([tmp_path / "absent"]) == 0


def test_what_cannot_be_limited_leaves_nothing(tmp_path: Path) -> None:
    memory, pids = tmp_path / "memory", tmp_path / "absent"
    memory.mkdir()
    place = GroupPlace(version=1, directories=(memory, pids))
    with pytest.raises(FileNotFoundError):
        make_group(place, group_paths(place, "one"), memory_bytes=1, num_processes=1)
    assert list(memory.iterdir()) == []
    assert not works(place)


@pytest.mark.process
def test_a_real_group_counts_and_stops() -> None:
    """The kernel's own limit, where this user may make groups."""
    place = probe_place()
    if place is None:
        pytest.skip("no control group is delegated to this user")
    groups = group_paths(place, f"prorl-test-{os.getpid()}-{time.monotonic_ns()}")
    make_group(place, groups, memory_bytes=(64 << 20), num_processes=20)
    try:
        eat = "python3 -c 'x = bytearray(400 << 20)'"
        argv = ["sh", "-c", enter_script(), "sh", *map(str, groups), "--"]
        killed = subprocess.run([*argv, "sh", "-c", f"{eat}; echo $?"], capture_output=True)
        assert killed.stdout.split() == [b"137"], killed
        assert num_oom_kills(groups) >= 1
        many = "i=0; while [ $i -lt 40 ]; do sleep 30 & i=$((i+1)); done; jobs -p; kill -9 0"
        crowd = subprocess.run(
            [*argv, "sh", "-c", many], capture_output=True, start_new_session=True
        )
        assert b"fork" in crowd.stderr.lower(), crowd
    finally:
        for group in groups:
            remove(group)


def remove(group: Path) -> None:
    """The kernel says busy until the last killed process is gone."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            group.rmdir()
        except OSError:
            assert time.monotonic() < deadline, f"{group} stays busy"
            time.sleep(0.05)
        else:
            return


def test_scopes_are_asked_for_by_property(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for systemd-run that keeps its words: there may be no systemd here."""
    runner = tmp_path / "systemd-run"
    runner.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\nexit $(cat {tmp_path}/code)\n')
    runner.chmod(0o755)
    (tmp_path / "code").write_text("0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    session = {"XDG_RUNTIME_DIR": "/run/user/7", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert find_scope_runner(session) == str(runner)
    assert "--user --scope" in (tmp_path / "said").read_text()
    (tmp_path / "code").write_text("1")
    assert find_scope_runner(session) is None
    assert find_scope_runner({}) is None, "no manager without a session"
    argv = scope_argv("systemd-run", memory_bytes=1000, num_processes=9)
    assert f"MemoryMax={1000 + RUNTIME_BYTES}" in argv
    assert "TasksMax=9" in argv
