"""(Plan, Site) to the text of each script. Pure and byte-stable: reads and writes nothing.

The templates hold the shell; this module fills in quoted values. Large arrays become chunks,
since Slurm's MaxArraySize caps the array index.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from hpc.errors import PlanError, SiteError
from hpc.plan import Job, Plan
from hpc.site import GpuSpelling, Placement, Site

SHAPES = ("single-node", "multi-node", "array")
_PLAIN = re.compile(r"[A-Za-z0-9_.,:/@%+=-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SLOT = re.compile(r"\{\{(\w+)\}\}")
_SETUP = (
    "",
    "# ---- What this site needs first ----",
    "# A line that fails ends the job; what fails inside a sourced file is that file's business.",
    "# shellcheck disable=SC2329 # the trap calls it",
    "setup_failed() {",
    "    [ ${#BASH_SOURCE[@]} -le 2 ] || return 0",
    '    "$python" -m hpc.start refuse "$script" "$(sed -n "${1}p" "$0")"',
    "    exit 2",
    "}",
    "trap 'setup_failed $LINENO' ERR",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One Slurm job of a planned job: all of it, or a part of its array."""

    job: str
    number: int
    index_offset: int
    size: int | None
    """Array tasks; None for a plain job."""
    limit: int | None
    """Array tasks that run at once."""

    @property
    def name(self) -> str:
        """Name of the script: that of the job, with the chunk's number from the second on."""
        return self.job if self.number == 0 else f"{self.job}.chunk-{self.number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """How scripts reach the `hpc` package."""

    python: str
    """Absolute path."""
    package_root: str | None = None
    """Put on PYTHONPATH where the package isn't installed (a checkout)."""


def chunks(job: Job, site: Site) -> tuple[Chunk, ...]:
    """The Slurm jobs of a planned job; a %limit is divided over the chunks of an array.

    Raises SiteError for a limit that is smaller than the number of chunks.
    """
    if job.array_size is None:
        return (Chunk(job=job.name, number=0, index_offset=0, size=None, limit=None),)
    count = -(-job.array_size // site.max_array_size)
    if job.array_limit is not None and job.array_limit < count:
        raise SiteError(
            f"array_limit={job.array_limit} of job {job.name!r} can't be divided over {count} "
            f"arrays (site.max_array_size={site.max_array_size}); give at least {count}"
        )
    return tuple(chunk(job, site, number=number, count=count) for number in range(count))


def chunk(job: Job, site: Site, *, number: int, count: int) -> Chunk:
    """Chunk `number` of `count`."""
    assert job.array_size is not None
    offset = number * site.max_array_size
    limit = None
    if job.array_limit is not None:
        limit = max(1, job.array_limit // count + (number < job.array_limit % count))
    size = max(1, min(site.max_array_size, job.array_size - offset))
    return Chunk(job=job.name, number=number, index_offset=offset, size=size, limit=limit)


def shape(job: Job) -> str:
    """Which template serves the job. Raises PlanError for an array of multi-node jobs."""
    if job.array_size is not None and job.resources.nodes > 1:
        raise PlanError(
            f"job {job.name!r} asks for an array whose tasks have nodes={job.resources.nodes}; "
            "give array tasks one node each"
        )
    if job.array_size is not None:
        return "array"
    return "multi-node" if job.resources.nodes > 1 else "single-node"


def render(
    plan: Plan, site: Site, *, templates: Mapping[str, str], interpreter: Interpreter
) -> dict[str, str]:
    """Script name to script text, in submission order; `templates` holds the text by shape.

    Raises PlanError or SiteError naming the value that no script can hold.
    """
    _check_directory(plan)
    return {
        part.name: render_chunk(
            plan, site, job=job, part=part, templates=templates, interpreter=interpreter
        )
        for job in plan.ordered()
        for part in chunks(job, site)
    }


def render_chunk(
    plan: Plan,
    site: Site,
    *,
    job: Job,
    part: Chunk,
    templates: Mapping[str, str],
    interpreter: Interpreter,
) -> str:
    """Text of one script."""
    placement = site.placement(job.role)
    environment = [_export(job, name=name, value=value) for name, value in job.environment]
    if interpreter.package_root is not None:
        root = shlex.quote(interpreter.package_root)
        environment.append(f"export PYTHONPATH={root}${{PYTHONPATH:+:$PYTHONPATH}}")
    values = {
        "run": _comment(plan.run),
        "job": job.name,
        "role": job.role,
        "nodes": str(job.resources.nodes),
        "cpus_per_node": str(job.resources.cpus_per_node),
        "script": f"{part.name}.sbatch",
        "directives": "\n".join(directives(plan, site, job=job, part=part)),
        "run_directory": shlex.quote(plan.run_directory),
        "index_offset": str(part.index_offset),
        "grace_seconds": str(job.grace_seconds),
        "walltime_minutes": str(job.resources.walltime_minutes),
        "attempts_without_progress": str(job.max_attempts_without_progress if job.restarts else 0),
        "on_preempt": placement.on_preempt.value,
        "scratch": shlex.quote(site.scratch),
        "environment": "\n".join(environment),
        "python": shlex.quote(interpreter.python),
        "command": shlex.join(job.command),
        "setup": "\n".join((*_SETUP, *site.setup, "trap - ERR")) if site.setup else "",
    }
    return fill(templates[shape(job)], values)


def fill(template: str, values: Mapping[str, str]) -> str:
    """Puts the values in; a line that holds one empty slot alone vanishes."""
    lines = []
    for line in template.splitlines():
        alone = _SLOT.fullmatch(line)
        if alone is None or values[alone[1]]:
            lines.append(_SLOT.sub(lambda slot: values[slot[1]], line))
    return "\n".join(lines) + "\n"


def directives(plan: Plan, site: Site, *, job: Job, part: Chunk) -> list[str]:
    """The `#SBATCH` lines of a chunk."""
    placement = site.placement(job.role)
    resources = job.resources
    logs = f"logs/{job.role}/slurm-{'%A_%a' if part.size is not None else '%j'}.out"
    if "%" in plan.run_directory:  # Slurm would read it as a pattern, also below --chdir
        logs = f"{plan.run_directory.replace('%', '%%')}/{logs}"
    options: list[tuple[str, str | int | None]] = [
        ("job-name", job_name(plan, job)),
        ("comment", comment(plan, job)),
        ("chdir", plan.run_directory),
        ("output", logs),
        ("open-mode", "append"),
        ("partition", placement.partition),
        ("account", placement.account),
        ("qos", placement.qos),
        ("reservation", placement.reservation),
        ("constraint", placement.constraint),
        ("nodes", resources.nodes),
        ("ntasks-per-node", 1),
        ("cpus-per-task", resources.cpus_per_node),
        ("mem", f"{resources.memory_mib}M"),
        *_gpus(job, site, placement),
        ("time", resources.walltime_minutes),
        ("signal", f"B:USR2@{job.grace_seconds}"),
    ]
    if part.size is not None:
        limit = f"%{part.limit}" if part.limit is not None else ""
        options.append(("array", f"0-{part.size - 1}{limit}"))
    lines = [f"#SBATCH --{name}={quote(str(v), name)}" for name, v in options if v is not None]
    lines.append(f"#SBATCH --{'requeue' if job.restarts else 'no-requeue'}")
    return lines + [_further(text) for text in placement.directives]


def _gpus(job: Job, site: Site, placement: Placement) -> list[tuple[str, str | int | None]]:
    count = job.resources.gpus_per_node
    if count == 0:
        return []
    kind = f"{placement.gpu_type}:" if placement.gpu_type else ""
    if site.gpu_spelling is GpuSpelling.gres:
        return [("gres", f"gpu:{kind}{count}")]
    return [("gpus-per-node", f"{kind}{count}")]


def _further(text: str) -> str:
    name, equals, value = text.partition("=")
    if not re.fullmatch(r"--?[A-Za-z][A-Za-z0-9-]*", name):
        raise SiteError(f"directive {text!r} is no sbatch option; write it as --name=value")
    return f"#SBATCH {name}{equals}{quote(value, name) if value else ''}"


def job_name(plan: Plan, job: Job) -> str:
    """Name in squeue."""
    return f"{plan.run}.{job.name}"


def comment(plan: Plan, job: Job) -> str:
    """By this the jobs of a run are told apart from those of others."""
    return f"prorl-hpc run={plan.run} job={job.name}"


def quote(value: str, field: str) -> str:
    """A value as sbatch reads it from a directive. Raises SiteError for control characters."""
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise SiteError(f"{field}={value!r} holds a control character; take it out")
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _export(job: Job, *, name: str, value: str) -> str:
    if not _VARIABLE.fullmatch(name) or "\0" in value:
        raise PlanError(
            f"environment of job {job.name!r}: {name}={value!r} can't be a shell variable; rename "
            "it, or take the NUL out"
        )
    return f"export {name}={shlex.quote(value)}"


def _check_directory(plan: Plan) -> None:
    if "\\" in plan.run_directory:
        raise PlanError(
            f"run directory {plan.run_directory!r} holds a backslash, after which Slurm no longer "
            "fills in the job id in log names; choose another"
        )


def _comment(text: str) -> str:
    if any(ord(character) < 32 for character in text):
        raise PlanError(f"run name {text!r} holds a control character; rename the run")
    return text
