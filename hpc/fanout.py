"""A Python function over a job array: submitit on Slurm, its local executor on one machine.

For short work beside a run: image builds, evaluations, checks of instances. Knows no learning.
"""

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hpc import slurm
from hpc.errors import FanoutError, SiteError, SubmitError
from hpc.plan import Resources
from hpc.prepare import interpreter
from hpc.site import Backend, GpuSpelling, Site
from hpc.status import PENDING_STATES, RUNNING_STATES

Argument = TypeVar("Argument")
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Done(Generic[Value]):
    """A call that returned."""

    value: Value


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A call that raised, or whose job was lost; the other calls are unaffected."""

    error: str
    """One line: the exception, or the state of the job."""
    log: Path | None


Result = Done[Value] | Failed


def fan_out(
    function: Callable[[Argument], Value],
    arguments: Sequence[Argument],
    *,
    site: Site,
    role: str,
    resources: Resources,
    directory: Path,
    at_once: int,
    timeout_seconds: float,
) -> list[Result[Value]]:
    """Calls `function` with each argument, at most `at_once` at the same time; keeps the order.

    `function` and its results are pickled by submitit: it must be importable where the jobs run.
    `directory` (shared by the nodes) keeps logs. Calls that haven't ended after `timeout_seconds`
    are cancelled and returned as failed. Raises FanoutError when nothing can be submitted.
    """
    if at_once < 1:
        raise FanoutError(f"at_once={at_once} is too small; give at least 1")
    until = time.monotonic() + timeout_seconds
    directory.mkdir(parents=True, exist_ok=True)
    batch = at_once if site.backend is Backend.local else site.max_array_size
    results: list[Result[Value]] = []
    for start in range(0, len(arguments), batch):
        part = list(arguments[start : start + batch])
        executor = _executor(
            site, role=role, resources=resources, directory=directory, at_once=at_once
        )
        try:
            with _scrubbed_environment():
                jobs = executor.map_array(_Guarded(function), part)
        except Exception as err:  # submitit raises its own kinds and subprocess's
            raise FanoutError(f"fan-out of {role!r} wasn't queued: {_line(err)}") from err
        lost: Callable[[list[Any]], list[Any]] = _ended_locally
        if site.backend is Backend.slurm:
            lost = _Watch().gone
        results += _collect(jobs, lost=lost, until=until)
    return results


@contextlib.contextmanager
def _scrubbed_environment() -> Iterator[None]:
    """A submission from inside a job must not inherit that job's variables."""
    before = dict(os.environ)
    kept = slurm.scrubbed(before)
    try:
        for name in before.keys() - kept.keys():
            del os.environ[name]
        yield
    finally:
        os.environ.update(before)


def _executor(site: Site, *, role: str, resources: Resources, directory: Path, at_once: int) -> Any:
    import submitit

    if resources.nodes != 1:
        raise SiteError(f"nodes={resources.nodes} for fan-out {role!r}; each call gets one node")
    if site.backend is Backend.local:
        local = submitit.LocalExecutor(folder=directory)
        local.update_parameters(timeout_min=resources.walltime_minutes)
        return local
    placement = site.placement(role)
    extra: dict[str, object] = {"chdir": str(directory)}
    if placement.reservation is not None:
        extra["reservation"] = placement.reservation
    if resources.gpus_per_node:
        kind = f"{placement.gpu_type}:" if placement.gpu_type else ""
        gres = site.gpu_spelling is GpuSpelling.gres
        value = f"{kind}{resources.gpus_per_node}"
        extra["gres" if gres else "gpus-per-node"] = f"gpu:{value}" if gres else value
    root = interpreter().package_root
    setup = list(site.setup)
    if root is not None:
        setup.append(f"export PYTHONPATH={shlex.quote(root)}${{PYTHONPATH:+:$PYTHONPATH}}")
    executor = submitit.SlurmExecutor(folder=directory)
    executor.update_parameters(
        job_name=f"prorl-{role}",
        partition=placement.partition,
        account=placement.account,
        qos=placement.qos,
        constraint=placement.constraint,
        time=resources.walltime_minutes,
        nodes=1,
        ntasks_per_node=1,
        cpus_per_task=resources.cpus_per_node,
        mem=f"{resources.memory_mib}M",
        array_parallelism=at_once,
        additional_parameters=extra,
        setup=setup,
    )
    return executor


def _collect(
    jobs: list[Any], *, lost: Callable[[list[Any]], list[Any]], until: float
) -> list[Result[Any]]:
    """Waits for the result files; jobs that ended without one, or not in time, are failures."""
    results: dict[str, Result[Any]] = {}
    wait = 0.1
    while left := [job for job in jobs if job.job_id not in results]:
        gone = lost(left)
        for job in left:
            if Path(job.paths.result_pickle).exists():
                results[job.job_id] = _outcome(job)
            elif job in gone:
                error = f"job {job.job_id} was lost: it ended without a result"
                results[job.job_id] = Failed(error=error, log=_log(job))
            elif time.monotonic() >= until:
                job.cancel()
                error = f"job {job.job_id} didn't end in time; cancelled"
                results[job.job_id] = Failed(error=error, log=_log(job))
        if len(results) < len(jobs):
            time.sleep(wait)
            wait = min(2.0, wait * 1.5)
    return [results[job.job_id] for job in jobs]


def _ended_locally(jobs: list[Any]) -> list[Any]:
    return [job for job in jobs if job.done(force_check=True)]


class _Watch:
    """Asks squeue now and then which jobs are no longer queued or running.

    submitit would ask sacct, which many sites don't have. A job counts as gone when it was missing
    twice: its result may become visible on a shared file system later than its end.
    """

    def __init__(self, *, every_seconds: float = 10.0) -> None:
        self._every_seconds = every_seconds
        self._due = time.monotonic() + every_seconds
        self._missing: set[str] = set()

    def gone(self, jobs: list[Any]) -> list[Any]:
        if time.monotonic() < self._due:
            return []
        self._due = time.monotonic() + self._every_seconds
        try:
            rows = slurm.queue(sorted({job.job_id.split("_")[0] for job in jobs}))
        except SubmitError:  # the controller is busy: ask again later
            return []
        alive = {row.job_id for row in rows if row.state in (*PENDING_STATES, *RUNNING_STATES)}
        missing = {job.job_id for job in jobs} - alive
        twice = missing & self._missing
        self._missing = missing
        return [job for job in jobs if job.job_id in twice]


def _outcome(job: Any) -> Result[Any]:
    try:
        outcome = job.result()
    except Exception as err:  # submitit's own: a result that can't be read
        return Failed(error=f"job {job.job_id} was lost: {_line(err)}", log=_log(job))
    return Failed(error=outcome, log=_log(job)) if isinstance(outcome, str) else outcome


@dataclass(frozen=True, slots=True)
class _Guarded(Generic[Argument, Value]):
    """Inside the job: what the function raises comes back as one line of text."""

    function: Callable[[Argument], Value]

    def __call__(self, argument: Argument) -> Done[Value] | str:
        try:
            return Done(value=self.function(argument))
        except Exception as err:
            return f"{type(err).__name__}: {' '.join(str(err).split())}"


def _log(job: Any) -> Path | None:
    path = Path(job.paths.stderr)
    return path if path.exists() else None


def _line(err: Exception) -> str:
    """The first line of an exception that may go on with hints and logs."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return lines[0] if lines else type(err).__name__
