"""Buffer and learner as one job: whose end ends what, with small stand-in processes."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from hpc.errors import EXIT_CONTINUE, EXIT_USER
from prorl_hpc.colocated import is_first_node, supervise

pytestmark = pytest.mark.process

WAITS = """
import pathlib, signal, sys, time
def end(number, frame):
    pathlib.Path(sys.argv[1]).write_text(str(number))
    sys.exit(int(sys.argv[2]))
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, end)
pathlib.Path(sys.argv[1] + ".ready").touch()
time.sleep(900)
"""


def waits(path: Path, code: int = 0) -> list[str]:
    """Waits for a signal, writes its number to `path`, ends with `code`."""
    return [sys.executable, "-c", WAITS, str(path), str(code)]


def ends(code: int, *, after: Path | None = None) -> list[str]:
    """Ends with `code`, once `after` exists."""
    wait = f"while not os.path.exists({str(after)!r}): time.sleep(0.02)" if after else ""
    return [sys.executable, "-c", f"import os, sys, time\n{wait}\nsys.exit({code})"]


@pytest.mark.parametrize("code", [0, 1, EXIT_USER, EXIT_CONTINUE])
def test_learner_ends_the_job_and_the_buffer_is_asked_to(code: int, tmp_path: Path) -> None:
    told = tmp_path / "buffer"
    learner = ends(code, after=Path(f"{told}.ready"))
    assert supervise(buffer=waits(told), learner=learner) == code
    assert told.read_text() == str(int(signal.SIGTERM))


def test_lost_buffer_lets_the_learner_save_and_asks_for_another_attempt(tmp_path: Path) -> None:
    told = tmp_path / "learner"
    wait = f"while not os.path.exists({str(told) + '.ready'!r}): time.sleep(0.02)"
    text = f"import os, time\n{wait}\nos.kill(os.getpid(), 9)"
    killed = [sys.executable, "-c", text]
    assert supervise(buffer=killed, learner=waits(told, EXIT_CONTINUE)) == EXIT_CONTINUE
    assert told.read_text() == str(int(signal.SIGTERM))


def test_error_of_the_buffer_stays_an_error(tmp_path: Path) -> None:
    told = tmp_path / "learner"
    buffer = ends(3, after=Path(f"{told}.ready"))
    assert supervise(buffer=buffer, learner=waits(told, EXIT_CONTINUE)) == 3


def test_buffer_that_finished_is_no_loss(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    buffer = [sys.executable, "-c", f"open({str(marker)!r}, 'w').close()"]
    assert supervise(buffer=buffer, learner=ends(0, after=marker)) == 0


def test_warning_before_the_walltime_reaches_the_learner(tmp_path: Path) -> None:
    learner, buffer = tmp_path / "learner", tmp_path / "buffer"

    def warn() -> None:
        deadline = time.monotonic() + 300
        ready = [Path(f"{path}.ready") for path in (learner, buffer)]
        while not all(path.exists() for path in ready) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR2)

    thread = threading.Thread(target=warn)
    thread.start()
    code = supervise(buffer=waits(buffer), learner=waits(learner, EXIT_CONTINUE))
    thread.join()
    assert code == EXIT_CONTINUE
    assert learner.read_text() == str(int(signal.SIGUSR2))
    assert buffer.read_text() == str(int(signal.SIGTERM))


def test_stubborn_process_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    text = (
        "import signal, sys, time, pathlib\nsignal.signal(15, signal.SIG_IGN)\n"
        f"pathlib.Path({str(ready)!r}).touch()\ntime.sleep(900)"
    )
    deaf = [sys.executable, "-c", text]
    code = supervise(buffer=deaf, learner=ends(0, after=ready), buffer_grace_seconds=0.2)
    assert code == 0


def test_further_nodes_run_only_the_learner() -> None:
    assert is_first_node({})
    assert is_first_node({"SLURM_NODEID": "0"})
    assert not is_first_node({"SLURM_NODEID": "1"})
