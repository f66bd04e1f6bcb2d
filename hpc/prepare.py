"""Checks a plan against a site and writes what a run directory holds before the first job.

Queues nothing. The frozen plan and site are what every later command reads.
"""

import dataclasses
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

import hpc
from hpc import ledger, slurm
from hpc.errors import PlanError, RunNotFound, SiteError, SubmitError
from hpc.files import asset_directory, publish
from hpc.keys import unknown_key
from hpc.plan import FORMAT, Job, Plan
from hpc.render import SHAPES, Interpreter, chunks, render, shape
from hpc.rundir import RunDirectory
from hpc.site import Backend, Placement, Site

Decoded = TypeVar("Decoded")

LOCAL_TASKS = 32
"""Tasks of one job on the local backend, unless `site.extra.max_tasks` says otherwise."""


def templates() -> dict[str, str]:
    """The packaged template of each job shape."""
    directory = asset_directory("slurm_templates")
    return {name: (directory / f"{name}.sbatch").read_text() for name in SHAPES}


def interpreter() -> Interpreter:
    """This Python, and the checkout's root where the package isn't installed into it."""
    root = Path(hpc.__file__).resolve().parent.parent
    installed = root == Path(sysconfig.get_paths()["purelib"]).resolve()
    return Interpreter(python=sys.executable, package_root=None if installed else str(root))


def check(plan: Plan, site: Site) -> None:
    """Refuses a plan that this site can't run. Raises PlanError or SiteError naming the field."""
    if not Path(plan.run_directory).is_absolute():
        raise PlanError(f"run directory {plan.run_directory!r} is relative; give its full path")
    for job in plan.jobs:
        shape(job)
        chunks(job, site)
        check_size(job, job.array_size or 1, site=site)
        _check_job(job, site, site.placement(job.role))
    check_hours(plan, site)


def check_hours(plan: Plan, site: Site) -> None:
    """Refuses a plan above the site's node-hours. Raises SiteError."""
    hours = plan.node_hours()
    if site.max_node_hours is not None and hours > site.max_node_hours:
        raise SiteError(
            f"the plan asks for {hours:.1f} node-hours, above site.max_node_hours="
            f"{site.max_node_hours:g}; ask for fewer nodes or less walltime, or raise the limit"
        )


def check_size(job: Job, count: int, *, site: Site) -> None:
    """Refuses more tasks of a job than its partition, or one machine, may give. SiteError."""
    most = int(site.extra.get("max_tasks", LOCAL_TASKS))
    if site.backend is Backend.local and count > most:
        raise SiteError(
            f"{count} tasks of job {job.name!r} are too many for one machine; ask for at most "
            f"{most}, or set site.extra.max_tasks"
        )
    place = site.placement(job.role)
    nodes = count * job.resources.nodes
    if job.array_size is not None and place.max_nodes is not None and nodes > place.max_nodes:
        raise SiteError(
            f"{count} tasks of job {job.name!r} exceed max_nodes={place.max_nodes} of partition "
            f"{place.partition!r} on site {site.name!r}; ask for fewer, or raise "
            f"site.placements.{job.role}.max_nodes"
        )


def _check_job(job: Job, site: Site, placement: Placement) -> None:
    resources = job.resources
    nodes = 1 if site.backend is Backend.local else placement.max_nodes
    asked = (
        ("nodes", resources.nodes, "max_nodes", nodes),
        ("walltime_minutes", resources.walltime_minutes, "max_walltime_minutes",
         placement.max_walltime_minutes),
        ("cpus_per_node", resources.cpus_per_node, "cpus_per_node", placement.cpus_per_node),
        ("memory_mib", resources.memory_mib, "memory_mib", placement.memory_mib),
    )  # fmt: skip
    for name, value, limit_name, limit in asked:
        if limit is not None and value > limit:
            raise SiteError(
                f"{name}={value} of job {job.name!r} exceeds {limit_name}={limit} of partition "
                f"{placement.partition!r} on site {site.name!r}; ask for less, or choose another "
                "site"
            )
    if job.grace_seconds >= 60 * resources.walltime_minutes:
        raise SiteError(
            f"grace_seconds={job.grace_seconds} of job {job.name!r} leaves nothing of its "
            f"walltime_minutes={resources.walltime_minutes}; ask for more walltime"
        )


def check_cluster(plan: Plan, site: Site) -> None:
    """Asks Slurm for the partitions. Raises SiteError for one that is absent or too small."""
    for job in plan.jobs:
        name = site.placement(job.role).partition
        found = slurm.partition(name)
        limits = (
            ("walltime_minutes", job.resources.walltime_minutes, found.max_walltime_minutes),
            ("nodes", job.resources.nodes, found.max_nodes),
        )
        for field, value, limit in limits:
            if limit is not None and value > limit:
                raise SiteError(
                    f"{field}={value} of job {job.name!r} exceeds {limit}, the limit of partition "
                    f"{name!r}; ask for less, or choose another partition"
                )


def prepare(run: RunDirectory, *, plan: Plan, site: Site) -> list[Path]:
    """Writes plan, site, scripts, README.txt and the log directories; returns the scripts.

    Idempotent: writing the same plan again changes nothing. Raises SubmitError where the run
    directory already holds another plan that was launched.
    """
    check(plan, site)
    scripts = render(plan, site, templates=templates(), interpreter=interpreter())
    if run.ledger.exists() and run.plan.exists() and load(run)[0] != plan:
        raise SubmitError(f"{run.root} was launched with another plan; choose another run name")
    for job in plan.jobs:
        (run.logs / job.role).mkdir(parents=True, exist_ok=True)
    for directory in (run.scripts, run.endpoints, run.root / "progress", run.root / "desired"):
        directory.mkdir(parents=True, exist_ok=True)
    for name, text in scripts.items():
        publish(run.script(name), data=text.encode(), mode=0o755)
    publish(run.site, data=msgspec.json.format(msgspec.json.encode(site)) + b"\n")
    publish(run.readme, data=readme(plan, site).encode())
    publish(run.plan, data=msgspec.json.format(msgspec.json.encode(plan)) + b"\n")
    return [run.script(name) for name in scripts]


def load(run: RunDirectory) -> tuple[Plan, Site]:
    """The frozen plan and site. Raises RunNotFound or PlanError naming the file."""
    try:
        plan = _decode(run.plan, Plan)
        site = _decode(run.site, Site)
    except FileNotFoundError as err:
        raise RunNotFound(f"{run.root} is no run directory: {err.filename} is missing") from err
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise PlanError(f"plan.json or site.json in {run.root} is damaged: {err}") from err
    if plan.format > FORMAT:
        raise PlanError(f"{run.plan} has format {plan.format}, newer than {FORMAT}; update")
    return plan, site


def _decode(path: Path, kind: type[Decoded]) -> Decoded:
    data = msgspec.json.decode(path.read_bytes())
    wrong = unknown_key(data, kind)
    if wrong is not None:
        raise PlanError(f"{path}: {wrong}")
    return msgspec.convert(data, kind)


def readme(plan: Plan, site: Site) -> str:
    """README.txt of a run: how to start it by hand."""
    lines = [
        f"Run {plan.run}, written by prorl-hpc for site {site.name}.",
        "",
        "These scripts are what `prorl-hpc submit` queues. By hand, in this order, from this",
        "directory; put the job ids that sbatch prints where a dependency asks for them:",
        "",
    ]
    for job in plan.ordered():
        for part in chunks(job, site):
            after = ":".join(f"<id of {name}>" for name in job.after)
            option = f"--dependency=after:{after} " if after else ""
            lines.append(f"    sbatch {option}scripts/{part.name}.sbatch")
    lines += [
        "",
        "Without Slurm: `bash scripts/<job>.sbatch` starts one job, PRORL_TASK=3 its fourth array",
        "task. Exit code 75 means that the job wants to be started again.",
        "",
        "ledger.jsonl   what was submitted, started and ended, and why",
        "logs/          one directory for each role, index and attempt; Slurm's own output beside",
        "plan.json      the jobs; site.json the cluster",
        "stop           if this file exists, no attempt starts any more",
        "",
    ]
    return "\n".join(lines)


def indexes_of(run: RunDirectory, job: Job) -> tuple[int, ...]:
    """The indexes that the user wants of a job: the plan's, or as many as `scale` asked for."""
    if job.array_size is None:
        return (0,)
    try:
        return tuple(range(int(run.desired(job.name).read_text())))
    except (OSError, ValueError):
        return tuple(range(job.array_size))


def scaled(run: RunDirectory, plan: Plan, sizes: Mapping[str, int]) -> Plan:
    """The plan with its arrays as large as the user wants them, those of `sizes` as it says."""
    jobs = tuple(
        job
        if job.array_size is None
        else dataclasses.replace(
            job, array_size=max(1, sizes.get(job.name, len(indexes_of(run, job))))
        )
        for job in plan.jobs
    )
    return dataclasses.replace(plan, jobs=jobs)


def peers(plan: Plan, job: Job) -> set[str]:
    """Names of the jobs that work together with `job`: all that start orders tie to it."""
    found = {job.name}
    while True:
        more = {
            other.name
            for other in plan.jobs
            if other.name in found
            or found & set(other.after)
            or any(other.name in plan.job(name).after for name in found)
        }
        if more <= found:
            return found
        found |= more


def unfinished(
    plan: Plan, *, finished: set[tuple[str, int]], wanted: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Which indexes of which jobs a resumed run needs.

    Jobs that work together all come back when one of them isn't finished: a learner that goes on
    needs its buffer. A job that stands alone starts what it still lacks.
    """
    needed: dict[str, tuple[int, ...]] = {}
    for job in plan.ordered():
        group = peers(plan, job)
        group_done = all((name, index) in finished for name in group for index in wanted[name])
        if group_done:
            needed[job.name] = ()
        elif len(group) > 1:
            needed[job.name] = wanted[job.name]
        else:
            missing = (index for index in wanted[job.name] if (job.name, index) not in finished)
            needed[job.name] = tuple(missing)
    return needed


def finished_indexes(run: RunDirectory) -> set[tuple[str, int]]:
    """(job, index) whose last attempt ended with its work done, by the ledger."""
    return {
        key
        for key, history in ledger.fold(ledger.read(run.ledger)).items()
        if history.last_exit is not None and history.last_exit.next == "finished"
    }
