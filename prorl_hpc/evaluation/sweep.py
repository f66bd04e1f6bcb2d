"""Several policy versions of a run evaluated as a job array, one version per job.

Knows the fan-out of the cluster layer and `evaluate`; prints nothing. A version whose job was lost
is a value among the results: the others are unaffected.
"""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc.fanout import Done, Failed, Result, fan_out
from hpc.plan import Resources
from hpc.scratch import OwnedDirectory
from hpc.site import Backend, Site
from prorl_hpc.choices import InferencePlacement
from prorl_hpc.evaluation.evaluate import Evaluation, as_data, evaluate, with_engine
from prorl_hpc.recipe import Recipe

FORMAT = 1
ROLE = "evaluation"
SLURM_JOBS = 8
"""Array tasks at once on a cluster, unless the user says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionJob:
    """What one job of the array is to do; pickled by the fan-out."""

    recipe: Recipe
    version: int
    model: Path
    target: str
    num_samples: int
    ks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionResult:
    """One version: its evaluation, or why there is none."""

    version: int
    evaluation: Evaluation | None
    error: str = ""
    log: Path | None = None


def evaluate_version(job: VersionJob) -> Evaluation:
    """Runs inside a job of the array."""
    with OwnedDirectory.make("eval") as scratch:
        return asyncio.run(
            evaluate(
                job.recipe,
                model=job.model,
                target=job.target,
                num_samples=job.num_samples,
                ks=job.ks,
                scratch=scratch,
            )
        )


def sweep(
    jobs: Sequence[VersionJob],
    *,
    site: Site,
    directory: Path,
    at_once: int | None,
    timeout_seconds: float,
    function: Callable[[VersionJob], Evaluation] = evaluate_version,
) -> list[VersionResult]:
    """Evaluates each version with the resources of a rollout node, and keeps the order.

    `directory` (shared by the nodes) keeps the jobs' logs. Raises FanoutError when nothing can be
    queued, SiteError when the site places neither evaluations nor rollout nodes.
    """
    if site.backend is Backend.local:
        at_once = at_once or 1
    results: list[Result[Evaluation]] = fan_out(
        function,
        jobs,
        site=placed(site, jobs[0].recipe),
        role=ROLE,
        resources=resources(jobs[0].recipe, site),
        directory=directory,
        at_once=at_once or SLURM_JOBS,
        timeout_seconds=timeout_seconds,
    )
    return [_result(job, result) for job, result in zip(jobs, results, strict=True)]


def _result(job: VersionJob, result: Result[Evaluation]) -> VersionResult:
    if isinstance(result, Failed):
        return VersionResult(
            version=job.version, evaluation=None, error=result.error, log=result.log
        )
    assert isinstance(result, Done)
    return VersionResult(version=job.version, evaluation=result.value)


def placed(site: Site, recipe: Recipe) -> Site:
    """The site with evaluations where the recipe's engines go, unless it has a place for them."""
    if ROLE in site.placements:
        return site
    own_jobs = recipe.inference.placement is InferencePlacement.own_jobs
    place = site.placement("inference" if own_jobs else "rollout")
    return dataclasses.replace(site, placements={**site.placements, ROLE: place})


def resources(recipe: Recipe, site: Site) -> Resources:
    """Those of a node that has the engine, cut to what a node of the partition has."""
    wanted = with_engine(recipe).rollout
    place = placed(site, recipe).placement(ROLE)
    minutes = wanted.walltime_minutes
    return Resources(
        nodes=1,
        cpus_per_node=min(wanted.cpus_per_node, place.cpus_per_node or wanted.cpus_per_node),
        memory_mib=min(wanted.memory_mib, place.memory_mib or wanted.memory_mib),
        gpus_per_node=wanted.gpus_per_node,
        walltime_minutes=min(minutes, place.max_walltime_minutes or minutes),
    )


def results_json(run: str, results: Sequence[VersionResult]) -> str:
    """All versions as JSON text; a failed one holds `error` in place of `tasks`."""
    versions: list[Mapping[str, Any]] = []
    for one in results:
        if one.evaluation is None:
            versions.append({"version": one.version, "error": one.error})
        else:
            versions.append({"version": one.version, **as_data(one.evaluation)})
    return json.dumps({"format": FORMAT, "run": run, "versions": versions}, indent=2) + "\n"
