"""Writes a run directory whole before anything is started. Starts nothing itself.

A run that was started keeps its recipe; one that never was (a dry run) may be written anew.
"""

import contextlib
import fcntl
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from hpc.errors import UserError
from hpc.files import asset_directory, publish
from hpc.plan import Plan
from hpc.render import SHAPES, Interpreter, render
from hpc.site import Backend, Site
from prorl_hpc.recipe import Recipe, dump_recipe
from prorl_hpc.run import Run


class RunExists(UserError, FileExistsError):
    """Another recipe's run has this name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frozen:
    """What submit knows before it starts jobs."""

    recipe: Recipe
    site: Site
    plan: Plan
    provenance: str
    scripts: dict[str, str]


def render_scripts(plan: Plan, site: Site) -> dict[str, str]:
    """Script name to text, as this installation renders it."""
    directory = asset_directory("slurm_templates")
    templates = {shape: (directory / f"{shape}.sbatch").read_text() for shape in SHAPES}
    package_root = Path(__file__).resolve().parent.parent.parent
    installed = package_root.name in ("site-packages", "dist-packages")
    interpreter = Interpreter(
        python=sys.executable, package_root=None if installed else str(package_root)
    )
    return render(plan, site, templates=templates, interpreter=interpreter)


def was_started(run: Run) -> bool:
    """Whether any job of the run was ever submitted or began."""
    return run.ledger.exists() and run.ledger.stat().st_size > 0


def freeze(run: Run, frozen: Frozen) -> bool:
    """Writes the run directory; False when it exists with this very recipe and was started.

    Raises RunExists when a started run of that name has another recipe.
    """
    text = dump_recipe(frozen.recipe)
    if was_started(run):
        if run.recipe.is_file() and run.recipe.read_text() == text:
            return False
        raise RunExists(
            f"run {run.name!r} was started with another recipe ({_difference(run, text)}); choose "
            f"--name, or continue it with `prorl-hpc resume {run.name}`"
        )
    _write(run, frozen, text)
    return True


@contextlib.contextmanager
def submit_lock(run: Run) -> Iterator[None]:
    """Two submits of one name at once follow each other (where the file system has locks)."""
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run.root / ".submit.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as err:
        raise UserError(f"run directory {str(run.root)!r} can't be made: {err.strerror}") from err
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(run: Run, frozen: Frozen, recipe_text: str) -> None:
    from prorl_hpc.buffer.keys import make_keys

    roles = {job.role for job in frozen.plan.jobs}
    # Slurm opens the logs itself and fails without a word when their directory is missing.
    for directory in (run.scripts, run.endpoints, *(run.logs / role for role in sorted(roles))):
        directory.mkdir(parents=True, exist_ok=True)
    make_keys(run)
    for path in run.scripts.glob("*.sbatch"):
        if path.stem not in frozen.scripts:
            path.unlink()
    for name, text in frozen.scripts.items():
        publish(run.script(name), data=text.encode(), mode=0o755)
    publish(run.plan, data=_json(frozen.plan))
    publish(run.site, data=_json(frozen.site))
    publish(run.provenance, data=frozen.provenance.encode())
    publish(run.readme, data=_readme(run, frozen).encode())
    # Last: a directory with a recipe is a run.
    publish(run.recipe, data=recipe_text.encode())


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def _readme(run: Run, frozen: Frozen) -> str:
    lines = [
        f"Run {run.name} of prorl-hpc.",
        "",
        "recipe.yaml      what is trained; frozen: editing recipes changes nothing here",
        "plan.json        jobs, resources, order",
        "site.json        the cluster's facts that the scripts were rendered for",
        "provenance.json  versions, commit, host, command line",
        "scripts/         one script per job",
        "logs/            logs/ROLE/INDEX/attempt-N/out.log; never overwritten",
        "metrics/         JSON lines per role, TensorBoard events of the learner",
        "policy/          published policy versions (safetensors); checkpoints/ to continue from",
        "buffer/          every trajectory, as HDF5 shards with a manifest",
        "secrets/         the run's keys; readable by you alone",
        "",
        f"prorl-hpc watch {run.name}     live progress",
        f"prorl-hpc status {run.name}    jobs and what ails them",
        f"prorl-hpc cancel {run.name}    end in good order; `resume` continues",
        "",
    ]
    if frozen.site.backend is Backend.slurm:
        lines += ["The same run by hand, in this order (each line prints a job id):", ""]
        lines += [f"    cd {shlex.quote(str(run.root))}"]
        lines += [f"    sbatch scripts/{name}.sbatch" for name in frozen.scripts]
        lines += ["", "The jobs find each other through endpoints/ and wait a bounded time for it."]
    else:
        lines += ["This site has no Slurm: `prorl-hpc submit` supervises the scripts as processes."]
    return "\n".join(lines) + "\n"


def _difference(run: Run, text: str) -> str:
    """The first value that differs, in words."""
    try:
        old = _flat(yaml.safe_load(run.recipe.read_text()))
    except (OSError, yaml.YAMLError):
        return "its recipe.yaml can't be read"
    new = _flat(yaml.safe_load(text))
    changed = [key for key in {**old, **new} if old.get(key, "-") != new.get(key, "-")]
    if not changed:
        return "same values, other order"
    key = changed[0]
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"{key}: {old.get(key, '-')} there, {new.get(key, '-')} here{more}"


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict) or not data:
        return {prefix.rstrip("."): data}
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.")
    return flat
