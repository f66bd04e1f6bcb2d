"""Launch, cancel, resume and scale a run, on Slurm or on this machine. Knows no learning.

Every command may be repeated: what is queued or running already is left alone.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpc import ledger, local, slurm
from hpc.errors import PlanError, RunNotFound, SubmitError
from hpc.files import publish, try_lock
from hpc.ledger import format_indexes
from hpc.plan import Job, Plan
from hpc.prepare import (
    check,
    check_cluster,
    check_hours,
    check_size,
    indexes_of,
    load,
    peers,
    prepare,
    scaled,
    unfinished,
)
from hpc.queueing import adopt, submit, submitted, without
from hpc.rundir import RunDirectory
from hpc.site import Backend, Site
from hpc.status import ALIVE, JobState, Phase, states, trouble

SETTLE_SECONDS = 60.0
"""Beyond the grace time, how long a resume waits for jobs that are still ending."""


def launch(run_directory: Path, plan: Plan, site: Site) -> None:
    """Prepares the run directory and starts every job that wasn't started before.

    Launching twice doubles nothing. Raises PlanError, SiteError or SubmitError before anything is
    queued where that can be known.
    """
    run = RunDirectory(Path(run_directory))
    check(plan, site)
    if site.backend is Backend.slurm:
        check_cluster(plan, site)
    run.root.mkdir(parents=True, exist_ok=True)
    with _alone(run):
        if run.stop_request.exists():
            raise SubmitError(f"run {run.name!r} was cancelled; `prorl-hpc resume` goes on")
        prepare(run, plan=plan, site=site)
        if site.backend is Backend.local:
            if not local.submitted(run):
                local.start(run)
            return
        adopt(run)
        wanted = {job.name: indexes_of(run, job) for job in plan.jobs}
        submit(run, plan, site, wanted=without(wanted, submitted(run)))


def cancel(run_directory: Path) -> None:
    """Ends the run in good order: jobs get SIGTERM and their grace time, none comes back.

    Raises RunNotFound, or SubmitError when Slurm can't be asked; the stop request stands anyway.
    """
    run = RunDirectory(Path(run_directory))
    _, site = load(run)
    publish(run.stop_request, data=b"cancelled by the user\n")
    now = time.time()
    if site.backend is Backend.local:
        local.notify(run, number=signal.SIGTERM)
        return
    with contextlib.suppress(SubmitError):
        adopt(run)  # half-made submissions belong to the run too
    found = states(run)
    _end_on_slurm(run, [state for state in found if state.phase in (*ALIVE, Phase.unknown)], now)


def _end_on_slurm(run: RunDirectory, found: list[JobState], now: float) -> None:
    """Pending jobs are taken off the queue, running ones asked to end."""
    by_job: dict[str, list[int]] = {}
    for state in found:
        if state.job_id:
            by_job.setdefault(state.job, []).append(state.index)
    plan, _ = load(run)
    for name, indexes in by_job.items():
        text = None if plan.job(name).array_size is None else format_indexes(indexes)
        entry = ledger.Cancel(time=now, job=name, indexes=text, reason="by the user")
        ledger.append(run.ledger, entry=entry)
    waiting = [s.job_id for s in found if s.job_id and s.phase is not Phase.running]
    running = [s.job_id for s in found if s.job_id and s.phase is Phase.running]
    if waiting:
        slurm.cancel(waiting)
    if running:
        slurm.cancel(running, signal="TERM")


def resume(run_directory: Path) -> None:
    """Starts again what isn't running and isn't finished; waits for what is still ending.

    Raises RunNotFound, or SubmitError where jobs don't end in time.
    """
    run = RunDirectory(Path(run_directory))
    plan, site = load(run)
    check(plan, site)
    if site.backend is Backend.slurm:
        check_cluster(plan, site)
    with _alone(run):
        going = site.backend is Backend.local and local.supervisor_pid(run) is not None
        if run.stop_request.exists():
            _settle(run, plan, site)
            run.stop_request.unlink(missing_ok=True)
        elif going:
            return
        elif site.backend is Backend.local:  # a killed supervisor's jobs may still be ending
            _settle(run, plan, site)
        if site.backend is Backend.slurm:
            _adopt(run)
        found = states(run)
        if site.backend is Backend.slurm:
            unclear = trouble(found)
            if unclear:
                raise SubmitError(f"can't tell what is running: {unclear}")
        wanted = {job.name: indexes_of(run, job) for job in plan.jobs}
        finished = {(s.job, s.index) for s in found if s.phase is Phase.finished}
        alive = {(s.job, s.index) for s in found if s.phase in ALIVE and s.job_id}
        needed = without(unfinished(plan, finished=finished, wanted=wanted), alive)
        _record_resume(run, plan, needed, found)
        if site.backend is Backend.local:
            local.start(run)
        else:
            submit(run, plan, site, wanted=needed)


def _adopt(run: RunDirectory) -> None:
    try:
        adopt(run)
    except SubmitError as err:
        raise SubmitError(f"can't tell what is running: {err}") from err


def _settle(run: RunDirectory, plan: Plan, site: Site) -> None:
    """Waits until what was asked to end has ended. Raises SubmitError where it doesn't in time."""
    seconds = SETTLE_SECONDS + max((job.grace_seconds for job in plan.jobs), default=0)
    if site.backend is Backend.local:
        if not local.wait_gone(run, seconds=seconds):
            raise SubmitError(f"run {run.name!r} is still ending after {seconds:.0f} s; try again")
        return
    until = time.monotonic() + seconds
    while still := [s for s in states(run) if s.phase is Phase.running]:
        if time.monotonic() >= until:
            raise SubmitError(
                f"job {still[0].job_id} ({still[0].job}) is still ending after {seconds:.0f} s; "
                "try again, or end it with scancel"
            )
        time.sleep(1.0)


def _record_resume(
    run: RunDirectory,
    plan: Plan,
    needed: Mapping[str, tuple[int, ...]],
    found: list[JobState],
) -> None:
    """Notes the resume; chains without progress are counted from here."""
    attempts = {(state.job, state.index): state.attempt for state in found}
    for job in plan.jobs:
        indexes = needed[job.name]
        if not indexes:
            continue
        for index in indexes:
            path = run.resumed(job.role, index=index)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(attempts.get((job.name, index), 0)))
        text = None if job.array_size is None else format_indexes(indexes)
        ledger.append(run.ledger, entry=ledger.Resume(time=time.time(), job=job.name, indexes=text))


def scale(run_directory: Path, job_name: str, count: int) -> None:
    """Changes how many tasks of an array run, while the run goes on.

    `job_name` may also be a role that one array has. Fewer: the highest indexes end in good
    order. Raises PlanError for a job without an array or a count below 1, and SiteError for
    more than the site gives.
    """
    run = RunDirectory(Path(run_directory))
    plan, site = load(run)
    job = _array_job(plan, job_name)
    if count < 1:
        raise PlanError(f"{count} tasks of {job.name!r} are too few; give at least 1")
    check_size(job, count, site=site)
    check_hours(scaled(run, plan, {job.name: count}), site)
    if run.stop_request.exists():
        raise SubmitError(f"run {run.name!r} was cancelled; `prorl-hpc resume` goes on")
    with _alone(run):
        if site.backend is Backend.local and local.supervisor_pid(run) is None:
            raise SubmitError(f"run {run.name!r} isn't running; `prorl-hpc resume` goes on")
        known = [] if site.backend is Backend.local else _going(run, plan, job)
        run.desired(job.name).parent.mkdir(exist_ok=True)
        publish(run.desired(job.name), data=f"{count}\n".encode())
        if site.backend is Backend.local:
            local.notify(run, number=signal.SIGHUP)  # one that ends just now reads it at a resume
            return
        found = [state for state in known if state.job == job.name]
        surplus = [s for s in found if s.index >= count and s.phase in (*ALIVE, Phase.unknown)]
        _end_on_slurm(run, surplus, time.time())
        kept = {
            (state.job, state.index)
            for state in found
            if (state.phase in ALIVE and state.job_id) or state.phase is Phase.finished
        }
        needed = without({job.name: tuple(range(count))}, kept)
        if needed[job.name]:
            _record_resume(run, plan, {j.name: needed.get(j.name, ()) for j in plan.jobs}, found)
        submit(run, plan, site, wanted=needed)


def _going(run: RunDirectory, plan: Plan, job: Job) -> list[JobState]:
    """The states of the run's jobs; SubmitError where none that `job` works with may be at work.

    Tasks that were queued alone would wait for a buffer that nobody starts.
    """
    adopt(run)
    if not submitted(run):
        raise SubmitError(f"run {run.name!r} was never started; prorl-hpc submit starts it")
    found = states(run)
    group = peers(plan, job)
    if not any(s.phase in (*ALIVE, Phase.unknown) and s.job_id for s in found if s.job in group):
        raise SubmitError(f"run {run.name!r} isn't running; `prorl-hpc resume` goes on")
    return found


def _array_job(plan: Plan, name: str) -> Job:
    arrays = [job for job in plan.jobs if job.array_size is not None]
    for job in arrays:
        if name == job.name:
            return job
    by_role = [job for job in arrays if job.role == name]
    if len(by_role) == 1:
        return by_role[0]
    known = ", ".join(job.name for job in arrays) or "none"
    raise PlanError(f"{name!r} is no array of this run; arrays are: {known}")


@contextlib.contextmanager
def _alone(run: RunDirectory) -> Iterator[None]:
    """One command at a time changes a run, where the file system has locks.

    Raises SubmitError while another does.
    """
    try:
        descriptor = os.open(run.root / "submit.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError as err:
        raise RunNotFound(f"{run.root} is no run directory") from err
    try:
        if not try_lock(descriptor):
            raise SubmitError(f"another prorl-hpc is changing run {run.name!r}; try again")
        yield
    finally:
        os.close(descriptor)
