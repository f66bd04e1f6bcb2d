"""A Python function over a job array: submitit on Slurm, its local executor on one machine.

For short work beside a run: image builds, evaluations, checks of instances. Knows no learning.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hpc.errors import FanoutError, SiteError
from hpc.plan import Resources
from hpc.site import Backend, GpuSpelling, Site

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
            jobs = executor.map_array(_Guarded(function), part)
        except Exception as err:  # submitit raises its own kinds and subprocess's
            raise FanoutError(f"fan-out of {role!r} wasn't queued: {_line(err)}") from err
        results += [_result(job, until=until) for job in jobs]
    return results


def _executor(site: Site, *, role: str, resources: Resources, directory: Path, at_once: int) -> Any:
    import submitit

    if resources.nodes != 1:
        raise SiteError(f"nodes={resources.nodes} for fan-out {role!r}; each call gets one node")
    if site.backend is Backend.local:
        local = submitit.LocalExecutor(folder=directory)
        local.update_parameters(timeout_min=resources.walltime_minutes)
        return local
    placement = site.placement(role)
    extra: dict[str, object] = {
        name: value
        for name, value in (
            ("reservation", placement.reservation),
            ("chdir", str(directory)),
        )
        if value is not None
    }
    gpus: dict[str, object] = {}
    if resources.gpus_per_node:
        kind = f"{placement.gpu_type}:" if placement.gpu_type else ""
        gres = site.gpu_spelling is GpuSpelling.gres
        name = "gres" if gres else "gpus_per_node"
        gpus[name] = f"{'gpu:' if gres else ''}{kind}{resources.gpus_per_node}"
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
        setup=list(site.setup),
        **gpus,
    )
    return executor


def _result(job: Any, *, until: float) -> Result[Any]:
    wait = 0.1
    while not job.done():
        left = until - time.monotonic()
        if left <= 0:
            job.cancel()
            return Failed(error=f"job {job.job_id} didn't end in time; cancelled", log=_log(job))
        time.sleep(min(wait, left))
        wait = min(5.0, wait * 1.5)
    try:
        outcome = job.result()
    except Exception as err:  # submitit's own: the job was lost
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
