"""Recipe to Plan: which jobs a run is made of, and whether the site has room. Pure, no I/O."""

import dataclasses
import sys
from pathlib import Path

from hpc.errors import SiteError
from hpc.plan import Job, Plan, Resources
from hpc.site import Placement, Site
from prorl_hpc.choices import InferencePlacement
from prorl_hpc.learner.host_memory import check_host_memory
from prorl_hpc.learner.memory import check_memory, facts_for
from prorl_hpc.recipe import InferenceConfig, Recipe, RecipeError, RolloutConfig

LEARNER_GRACE_SECONDS = 300
"""Warning before the learner's walltime: longer than a sharded checkpoint, plus 60 s."""

GRACE_SECONDS = 120


def make_plan(
    recipe: Recipe, site: Site, *, run_directory: Path, python: str = sys.executable
) -> Plan:
    """The jobs of a run; raises SiteError or PlanError for what the site can't give."""
    beside = _colocated(recipe)
    first = "learner" if beside else "buffer"
    jobs = [_rollout(recipe, site, run_directory, python, after=first)]
    if _has_inference_jobs(recipe):
        jobs.insert(0, _inference(recipe, site, run_directory, python, after=first))
    if beside:
        jobs.insert(0, _learner(recipe, site, run_directory, python, module="prorl_hpc.colocated"))
    else:
        jobs.insert(0, _buffer(recipe, site, run_directory, python))
        jobs.append(_learner(recipe, site, run_directory, python, after=("buffer",)))
    plan = Plan(run=recipe.name, run_directory=str(run_directory), jobs=tuple(jobs))
    hours = plan.node_hours()
    if site.max_node_hours is not None and hours > site.max_node_hours:
        raise SiteError(
            f"the plan takes {hours:.1f} node-hours per walltime, above "
            f"site.max_node_hours={site.max_node_hours:g}; lower rollout.nodes, inference.nodes, "
            f"learner.nodes or a walltime_minutes"
        )
    return plan


def make_service_plan(
    recipe: Recipe, site: Site, *, run_directory: Path, python: str = sys.executable
) -> Plan:
    """One job that serves rollouts over HTTP, with the resources of one rollout node."""
    alone = dataclasses.replace(recipe, rollout=dataclasses.replace(recipe.rollout, nodes=1))
    rollout = _rollout(alone, site, run_directory, python, after="")
    command = (python, "-m", "prorl_hpc.service", "--run", str(run_directory))
    job = dataclasses.replace(rollout, name="service", command=command, array_size=None, after=())
    return Plan(run=recipe.name, run_directory=str(run_directory), jobs=(job,))


def adjustments(recipe: Recipe, site: Site) -> list[str]:
    """What the site's limits changed of the recipe's wishes, in words."""
    wishes = [
        ("rollout", recipe.rollout.cpus_per_node, recipe.rollout.walltime_minutes),
        ("learner", recipe.learner.cpus_per_node, recipe.learner.walltime_minutes),
    ]
    if _has_inference_jobs(recipe):
        asked = recipe.inference
        wishes.insert(1, ("inference", asked.cpus_per_node, asked.walltime_minutes))
    if not _colocated(recipe):
        wishes.insert(0, ("buffer", recipe.buffer.cpus, recipe.buffer.walltime_minutes))
    notes: list[str] = []
    for role, cpus, minutes in wishes:
        place = site.placement(role)
        if place.cpus_per_node is not None and cpus > place.cpus_per_node:
            notes.append(f"{role}: {cpus} cores per node -> {place.cpus_per_node}, the node's own")
        if place.max_walltime_minutes is not None and minutes > place.max_walltime_minutes:
            notes.append(
                f"{role}: walltime {minutes} min -> {place.max_walltime_minutes}, the limit of "
                f"partition {place.partition}; its job chains over as many as it needs"
            )
    return notes


def _colocated(recipe: Recipe) -> bool:
    if recipe.buffer.colocate not in ("none", "learner"):
        raise RecipeError(
            f"buffer.colocate={recipe.buffer.colocate!r} is unknown; choose none or learner"
        )
    return recipe.buffer.colocate == "learner"


def _has_inference_jobs(recipe: Recipe) -> bool:
    return recipe.inference.placement is InferencePlacement.own_jobs


def _buffer(recipe: Recipe, site: Site, directory: Path, python: str) -> Job:
    wanted = recipe.buffer
    resources = _resources(
        site,
        "buffer",
        nodes=1,
        cpus=wanted.cpus,
        memory_mib=wanted.memory_mib,
        gpus=0,
        minutes=wanted.walltime_minutes,
        memory_key="buffer.memory_mib",
    )
    return Job(
        name="buffer",
        role="buffer",
        command=(python, "-m", "prorl_hpc.buffer", "--run", str(directory)),
        resources=resources,
        grace_seconds=_grace(resources, GRACE_SECONDS),
        environment=_threads(resources, 1),
    )


def _rollout(recipe: Recipe, site: Site, directory: Path, python: str, *, after: str) -> Job:
    return _array(recipe.rollout, "rollout", site, directory, python, after=after)


def _inference(recipe: Recipe, site: Site, directory: Path, python: str, *, after: str) -> Job:
    return _array(recipe.inference, "inference", site, directory, python, after=after)


def _array(
    wanted: RolloutConfig | InferenceConfig,
    role: str,
    site: Site,
    directory: Path,
    python: str,
    *,
    after: str,
) -> Job:
    """A job array with a node per task, whose module and recipe section are named as its role."""
    resources = _resources(
        site,
        role,
        nodes=1,
        array_size=wanted.nodes,
        cpus=wanted.cpus_per_node,
        memory_mib=wanted.memory_mib,
        gpus=wanted.gpus_per_node,
        minutes=wanted.walltime_minutes,
        memory_key=f"{role}.memory_mib",
    )
    return Job(
        name=role,
        role=role,
        command=(python, "-m", f"prorl_hpc.{role}", "--run", str(directory)),
        resources=resources,
        array_size=wanted.nodes,
        after=(after,),
        grace_seconds=_grace(resources, GRACE_SECONDS),
        environment=_threads(resources, 1),
    )


def _learner(
    recipe: Recipe,
    site: Site,
    directory: Path,
    python: str,
    *,
    module: str = "prorl_hpc.learner",
    after: tuple[str, ...] = (),
) -> Job:
    wanted = recipe.learner
    resources = _resources(
        site,
        "learner",
        nodes=wanted.nodes,
        cpus=wanted.cpus_per_node,
        memory_mib=wanted.memory_mib,
        gpus=wanted.gpus_per_node,
        minutes=wanted.walltime_minutes,
        memory_key="learner.memory_mib",
    )
    _check_learner_memory(recipe, site.placement("learner"))
    return Job(
        name="learner",
        role="learner",
        command=(python, "-m", module, "--run", str(directory)),
        resources=resources,
        after=after,
        grace_seconds=_grace(resources, LEARNER_GRACE_SECONDS),
        environment=_threads(resources, wanted.ranks_per_node),
    )


def _resources(
    site: Site,
    role: str,
    *,
    nodes: int,
    cpus: int,
    memory_mib: int,
    gpus: int,
    minutes: int,
    memory_key: str,
    array_size: int = 1,
) -> Resources:
    place = site.placement(role)
    at_once = nodes * array_size
    _check_room(site, role, place, nodes=at_once, memory_mib=memory_mib, memory_key=memory_key)
    return Resources(
        nodes=nodes,
        cpus_per_node=min(cpus, place.cpus_per_node or cpus),
        memory_mib=memory_mib,
        gpus_per_node=gpus,
        walltime_minutes=min(minutes, place.max_walltime_minutes or minutes),
    )


def _check_room(
    site: Site, role: str, place: Placement, *, nodes: int, memory_mib: int, memory_key: str
) -> None:
    if place.max_nodes is not None and nodes > place.max_nodes:
        raise SiteError(
            f"{role}.nodes={nodes} exceeds {place.max_nodes} on partition {place.partition!r} of "
            f"site {site.name!r}; choose fewer or raise site.placements.{role}.max_nodes"
        )
    if place.memory_mib is not None and memory_mib > place.memory_mib:
        raise SiteError(
            f"{memory_key}={memory_mib} exceeds the {place.memory_mib} MiB of a node on partition "
            f"{place.partition!r} of site {site.name!r}; lower it"
        )


def _check_learner_memory(recipe: Recipe, place: Placement) -> None:
    """Refuses a learner that can't fit where the site says how much there is."""
    wanted = recipe.learner
    stated = place.memory_mib is not None
    if wanted.gpus_per_node:
        available = place.gpu_memory_mib
    else:
        available = wanted.memory_mib // wanted.ranks_per_node if stated else None
    is_here = recipe.model.path is not None or bool(recipe.model.config)
    facts = facts_for(recipe) if is_here and (stated or available is not None) else None
    if facts is None:
        return
    if available is not None:
        check_memory(recipe, facts, available_bytes=available << 20)
    if wanted.gpus_per_node and stated:
        check_host_memory(recipe, facts)


def _grace(resources: Resources, wanted: int) -> int:
    """At most a quarter of the walltime, so that short jobs still work."""
    return max(1, min(wanted, resources.walltime_minutes * 60 // 4))


def _threads(resources: Resources, processes: int) -> tuple[tuple[str, str], ...]:
    """Threads per process: more than the job's cores make every one slower."""
    return (("OMP_NUM_THREADS", str(max(1, resources.cpus_per_node // processes))),)
