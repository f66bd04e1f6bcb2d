"""Buffer and learner as one job (`buffer.colocate=learner`), ended together in good order.

Run as `python -m prorl_hpc.colocated --run DIR` on every node of that job; the buffer lives
on the first one. Knows processes and exit codes; no wire and no model.

    signal (walltime, preemption) --> learner: saves, ends --> buffer: asked to end --> exit
    buffer dies by itself         --> learner: asked to end --> exit 75 (another attempt)
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from hpc.errors import EXIT_CONTINUE, EXIT_DONE, EXIT_USER

BUFFER_GRACE_SECONDS = 60.0
"""How long the buffer may take to seal and end once the learner has gone."""

LEARNER_GRACE_SECONDS = 600.0
"""How long the learner may take to save once the buffer has died."""

POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the learner's exit code, or 75 when the buffer was lost."""
    parser = argparse.ArgumentParser(prog="prorl_hpc.colocated", description=__doc__)
    parser.add_argument("--run", required=True)
    run = parser.parse_args(argv).run
    learner = [sys.executable, "-m", "prorl_hpc.learner", "--run", run]
    if not is_first_node(os.environ):
        os.execv(sys.executable, learner)  # noqa: S606 - nothing to supervise on further nodes
    return supervise(
        buffer=[sys.executable, "-m", "prorl_hpc.buffer", "--run", run], learner=learner
    )


def is_first_node(environment: Mapping[str, str]) -> bool:
    """Whether this is the first node of the job."""
    return environment.get("SLURM_NODEID", "0") in ("", "0")


def supervise(
    *,
    buffer: Sequence[str],
    learner: Sequence[str],
    buffer_grace_seconds: float = BUFFER_GRACE_SECONDS,
    learner_grace_seconds: float = LEARNER_GRACE_SECONDS,
) -> int:
    """Runs both commands until the learner has ended; signals go to the learner."""
    pair: dict[str, subprocess.Popen[bytes]] = {}
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        del frame
        asked.append(number)
        _signal(pair.get("learner"), number)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}
    try:
        pair["buffer"] = _start(buffer)
        pair["learner"] = _start(learner)
        for number in asked:  # came before the learner was there
            _signal(pair["learner"], number)
        lost = _watch(pair)
        if lost is not None:
            print(f"prorl-hpc: the buffer ended with {lost}; the learner saves", file=sys.stderr)
            _signal(pair["learner"], signal.SIGTERM)
            code = _wait(pair["learner"], seconds=learner_grace_seconds)
            return code if code in (EXIT_DONE, EXIT_USER) else _lost_code(lost)
        return _shell_code(pair["learner"].returncode)
    finally:
        for process in reversed(pair.values()):
            _signal(process, signal.SIGTERM)
            _wait(process, seconds=buffer_grace_seconds)
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(pair: Mapping[str, "subprocess.Popen[bytes]"]) -> int | None:
    """Returns when the learner has ended (None) or the buffer was lost (its exit code).

    A buffer that ended well is no loss: it does so when the run is done.
    """
    while pair["learner"].poll() is None:
        code = pair["buffer"].poll()
        if code is not None and code != 0:
            return _shell_code(code)
        time.sleep(POLL_SECONDS)
    return None


def _start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    """A process group of its own that dies with this process, whatever kills it."""
    return subprocess.Popen(
        command, process_group=0, preexec_fn=_die_with_parent, stdin=subprocess.DEVNULL
    )


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal(process: "subprocess.Popen[bytes] | None", number: int) -> None:
    if process is not None and process.poll() is None:
        process.send_signal(number)


def _wait(process: "subprocess.Popen[bytes]", *, seconds: float) -> int:
    """The exit code; what doesn't end in time is killed with its process group."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    return _shell_code(code)


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _lost_code(code: int) -> int:
    """An error of the program stays one; a kill from outside asks for another attempt."""
    return code if 0 < code < 128 and code != EXIT_CONTINUE else EXIT_CONTINUE


if __name__ == "__main__":
    sys.exit(main())
