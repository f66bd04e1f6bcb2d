"""Scratch directories: owned, found again after a crash, removed whatever lies in them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prorl_hpc.environment import processes
from prorl_hpc.environment.base import SandboxStartError, TransferError
from prorl_hpc.environment.channel import CappedOutput
from prorl_hpc.environment.files import read_untrusted
from prorl_hpc.environment.processes import ProcessInfo, ancestors, descendants
from prorl_hpc.environment.scratch import WorkerScratch


def test_close_leaves_nothing(tmp_path: Path) -> None:
    worker = WorkerScratch(tmp_path / "root")
    scratch = worker.open()
    hostile = scratch.layer / "a" / "b"
    hostile.mkdir(parents=True)
    (hostile / "file").write_text("1")
    hostile.chmod(0)
    hostile.parent.chmod(0o500)
    (scratch.outbox / "link").symlink_to("/usr")
    worker.release(scratch)
    assert not scratch.path.exists()
    worker.close()
    assert list((tmp_path / "root").iterdir()) == []
    assert Path("/usr").is_dir()


def test_the_living_are_left_alone_and_the_dead_removed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    living = WorkerScratch(root)
    kept = living.open()
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from prorl_hpc.environment.scratch import WorkerScratch\n"
        "w = WorkerScratch(Path(sys.argv[2])); w._tell = lambda line: None\n"
        "print(w.open().path, flush=True); time.sleep(600)\n"
    )
    repository = Path(__file__).resolve().parents[3]
    argv = [sys.executable, "-c", script, str(repository), str(root)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as dead:
        assert dead.stdout is not None
        left = Path(dead.stdout.readline().strip())
        assert left.is_dir()
        environment = {**os.environ, processes.TOKEN_VARIABLE: left.name}
        with subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True) as orphan:
            dead.kill()
            dead.wait()
            WorkerScratch(root).close()
            assert orphan.wait(timeout=300) == -9  # found by its token
    assert not left.exists()
    assert kept.path.is_dir()
    living.close()


def test_a_foreign_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(SandboxStartError, match="a link"):
        WorkerScratch(tmp_path / "link")
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxStartError, match="can't be used"):
        WorkerScratch(tmp_path / "file")


def test_a_stale_pid_file_names_no_stranger(tmp_path: Path) -> None:
    stale = tmp_path / "pid"
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
        stale.write_text(str(stranger.pid))
        table = processes.snapshot()
        assert processes.session_members(tmp_path, table) == [stranger.pid]
        old = time.time() - 3600
        os.utime(stale, (old, old))  # written an hour before the process started
        assert processes.session_members(tmp_path, table) == []
        stranger.kill()
    stale.write_text("not a number")
    assert processes.session_members(tmp_path, table) == []


def test_trees() -> None:
    def info(pid: int, parent: int) -> ProcessInfo:
        return ProcessInfo(
            pid=pid, parent=parent, session=1, state="S", started=0.0, resident_bytes=0
        )

    table = {pid: info(pid, parent) for pid, parent in ((2, 1), (3, 2), (4, 3), (5, 1), (6, 2))}
    assert descendants([2, 99], table) == [2, 3, 6, 4]
    assert ancestors([4], table) == [3, 2]


def test_capped_output_keeps_both_ends() -> None:
    output = CappedOutput(10)
    for part in (b"0123", b"4567", b"89abcdefgh"):
        output.feed(part)
    # 18 bytes: 5 from the head, 5 from the tail, 8 dropped
    assert output.value() == b"01234\n[... 8 bytes omitted ...]\ndefgh"
    exact = CappedOutput(4)
    exact.feed(b"abcd")
    assert (exact.value(), exact.truncated) == (b"abcd", False)


def test_only_plain_files_come_out(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"12345")
    assert read_untrusted(plain, what="get", limit_bytes=5) == b"12345"
    (tmp_path / "link").symlink_to(plain)
    os.mkfifo(tmp_path / "fifo")
    os.link(plain, tmp_path / "hard")
    for name, limit in (("plain", 4), ("link", 9), ("fifo", 9), ("hard", 9), (".", 9), ("no", 9)):
        with pytest.raises(TransferError):
            read_untrusted(tmp_path / name, what="get", limit_bytes=limit)
