"""Directories of attempts and commands whose owners were killed are removed by the next one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc.scratch import (
    LATE_SECONDS,
    OwnedDirectory,
    attempt_directory,
    make_scratch,
    owner,
    remove_scratch,
)

HOLDER = """
import sys, time
from pathlib import Path
from hpc.scratch import OwnedDirectory
made = OwnedDirectory.make("test", directory=Path(sys.argv[1]))
(made.path / "left").write_text("over")
print(made.path, flush=True)
time.sleep(9999)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "9999"])
    yield process
    process.kill()
    process.wait()


def place(base: Path, job: str, *, attempt: int = 1) -> Path:
    return attempt_directory(base, run=base, job=job, index=0, attempt=attempt, temporary="")


def test_what_a_killed_run_left_goes_with_the_next_start(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    now = time.time()
    killed, living = place(tmp_path, "killed"), place(tmp_path, "living")
    make_scratch(killed, owner=owner(sleeper.pid, deadline=None), now=now)
    make_scratch(living, owner=owner(os.getpid(), deadline=None), now=now)
    (killed / "big").write_text("file")
    make_scratch(place(tmp_path, "other"), owner=owner(os.getpid(), deadline=None), now=now)
    assert killed.is_dir()
    sleeper.kill()
    sleeper.wait()
    make_scratch(place(tmp_path, "next"), owner=owner(os.getpid(), deadline=None), now=now)
    assert not killed.parent.exists()
    assert living.is_dir()


def test_without_a_process_the_walltime_decides(tmp_path: Path) -> None:
    far = place(tmp_path, "learner")
    make_scratch(far, owner=owner(None, deadline=1000.0), now=0.0)
    other = place(tmp_path, "other")
    make_scratch(other, owner=owner(None, deadline=None), now=1000.0 + LATE_SECONDS)
    assert far.is_dir()
    make_scratch(place(tmp_path, "third"), owner=owner(None, deadline=None), now=5000.0)
    assert not far.exists()
    assert other.is_dir()  # nobody can tell


def test_the_owner_of_a_reused_process_id_is_gone() -> None:
    mine = owner(os.getpid(), deadline=None)
    assert not mine.is_gone(0.0)
    assert type(mine)(pid=mine.pid, start_ticks=mine.start_ticks - 1, deadline=None).is_gone(0.0)


def test_the_first_nodes_owner_stays(tmp_path: Path) -> None:
    scratch = place(tmp_path, "learner")
    make_scratch(scratch, owner=owner(os.getpid(), deadline=None), now=0.0)
    make_scratch(scratch, owner=owner(None, deadline=1.0), now=0.0)  # its own srun step
    make_scratch(place(tmp_path, "other"), owner=owner(None, deadline=None), now=9e9)
    assert scratch.is_dir()
    remove_scratch(scratch)
    assert not scratch.parent.exists()


@pytest.mark.process
def test_directories_of_killed_commands_are_swept(tmp_path: Path) -> None:
    with OwnedDirectory.make("mine", directory=tmp_path) as mine:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        with OwnedDirectory.make("third", directory=tmp_path):
            assert (theirs / "left").is_file()
        foreign = tmp_path / "prorl-12-ab"
        foreign.mkdir()  # no lock: not ours to remove
        process.send_signal(signal.SIGKILL)
        process.communicate()
        with OwnedDirectory.make("fourth", directory=tmp_path):
            assert not theirs.exists()
        assert mine.is_dir()
        assert foreign.is_dir()
    assert not mine.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["prorl-12-ab"]


def test_directories_that_others_make_and_remove_meanwhile_disturb_nobody(tmp_path: Path) -> None:
    """Many attempts of one array start and end on a node at once."""
    me = owner(os.getpid(), deadline=None)

    def come_and_go(index: int) -> None:
        for attempt in range(1, 60):
            scratch = tmp_path / "prorl-7" / f"key-rollout-{index}" / str(attempt)
            make_scratch(scratch, owner=me, now=0.0)
            remove_scratch(scratch)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(come_and_go, index) for index in range(8)]:
            done.result(timeout=120)
    assert list((tmp_path / "prorl-7").iterdir()) == []
