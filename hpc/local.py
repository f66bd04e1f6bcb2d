"""The same scripts as on Slurm, as supervised processes of one machine.

`python -m hpc.local RUN` is the supervisor of one run: it starts every array task as a process
group of its own, starts again what asks for it or was killed, warns before the walltime, and ends
all of it when the run is cancelled. It sleeps until a child ends, a signal comes or a timer is due.

    prorl-hpc ── start ──► supervisor ──┬─ bash scripts/buffer.sbatch ── command
                            │  guardian ├─ bash scripts/rollout.sbatch ── command    (PRORL_TASK=0)
                            └─ (pipe)   └─ ...
"""

import fcntl
import logging
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import hpc
from hpc import ledger
from hpc.errors import HpcError, SubmitError
from hpc.files import NO_LOCKS
from hpc.groups import stat
from hpc.prepare import load
from hpc.rundir import RunDirectory

START_SECONDS = 60.0
"""A supervisor that hasn't reported by then didn't start."""

_READY = "PRORL_READY_DESCRIPTOR"


def supervisor_pid(run: RunDirectory) -> int | None:
    """Process id of the run's living supervisor; None when it has none.

    After the death of one, its guardian holds the lock until all that it ran has ended.
    """
    try:
        descriptor = os.open(run.supervisor, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        if _lock(run, descriptor, fcntl.LOCK_SH):
            return None
        text = os.pread(descriptor, 32, 0).decode()
        pid = int(text) if text.strip().isdigit() else None
        known = None if pid is None else stat(pid)
        return pid if known is not None and known.state not in "ZX" else None
    finally:
        os.close(descriptor)


def start(run: RunDirectory) -> None:
    """Starts the run's supervisor, detached. A living one is left alone.

    Raises SubmitError with its words when it doesn't start.
    """
    if supervisor_pid(run) is not None:
        return
    reader, writer = os.pipe()
    root = str(Path(hpc.__file__).resolve().parent.parent)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (root, environment.get("PYTHONPATH")) if part
    )
    environment[_READY] = str(writer)
    run.logs.mkdir(parents=True, exist_ok=True)
    log_path = run.logs / "supervisor.log"
    try:
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "hpc.local", str(run.root)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(writer,),
                env=environment,
                cwd=run.root,
            )
        os.close(writer)
        ready, _, _ = select.select([reader], [], [], START_SECONDS)
        said = os.read(reader, 4096).decode() if ready else "no word from it"
    finally:
        os.close(reader)
    if said != "ready":
        if not ready:
            process.kill()
        raise SubmitError(f"the supervisor didn't start: {said or 'it died'}; see {log_path}")
    # the supervisor outlives this process on purpose: forget it without a warning
    process.returncode = 0


def notify(run: RunDirectory, *, number: signal.Signals) -> bool:
    """Signals the run's supervisor (SIGTERM: end all, SIGHUP: read the wanted sizes again)."""
    pid = supervisor_pid(run)
    if pid is None:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def wait_gone(run: RunDirectory, *, seconds: float) -> bool:
    """Waits until no supervisor lives any more; False when one still does after `seconds`."""
    until = time.monotonic() + seconds
    while _locked(run):
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
    return True


def _locked(run: RunDirectory) -> bool:
    try:
        descriptor = os.open(run.supervisor, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _lock(run, descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _lock(run: RunDirectory, descriptor: int, kind: int) -> bool:
    """Whether the lock could be had. Raises SubmitError where the file system has none."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as err:
        if err.errno not in NO_LOCKS:
            raise
        raise SubmitError(
            f"{run.root} lies on a file system without locks, by which site=local knows its "
            f"supervisor ({err.strerror}); choose another run_root"
        ) from err
    return True


def _take_lock(run: RunDirectory) -> int | None:
    descriptor = os.open(run.supervisor, os.O_RDWR | os.O_CREAT, 0o644)
    if not _lock(run, descriptor, fcntl.LOCK_EX):
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _report(text: str) -> None:
    descriptor = os.environ.pop(_READY, "")
    if descriptor.isdigit():
        os.write(int(descriptor), text.encode())
        os.close(int(descriptor))


def main(argv: list[str] | None = None) -> int:
    """Supervises one run until all its jobs have ended."""
    from hpc.supervisor import Supervisor

    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: python -m hpc.local RUN_DIRECTORY", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    run = RunDirectory(Path(arguments[0]).resolve())
    try:
        plan, site = load(run)
        lock = _take_lock(run)
        if lock is None:
            _report("ready")  # another supervisor serves this run already
            return 0
        supervisor = Supervisor(run=run, plan=plan, site=site)
        supervisor.enlist(time.time())
        _report("ready")
        return supervisor.serve()
    except (HpcError, OSError) as err:
        _report(str(err))
        print(f"prorl-hpc: {err}", file=sys.stderr)
        return 1


def submitted(run: RunDirectory) -> bool:
    """Whether a supervisor was ever started for this run."""
    return any(isinstance(entry, ledger.Submit) for entry in ledger.read(run.ledger).entries)


if __name__ == "__main__":
    sys.exit(main())
