"""Several versions at once: the job array with a stand-in evaluation, its files and refusals."""

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from hpc.errors import UserError
from hpc.site import Backend, Placement, Site
from prorl_hpc.choices import InferencePlacement
from prorl_hpc.cli.main import main
from prorl_hpc.evaluation.estimators import Interval
from prorl_hpc.evaluation.evaluate import Evaluation, TaskScore, with_engine
from prorl_hpc.evaluation.sweep import (
    VersionJob,
    VersionResult,
    placed,
    resources,
    results_json,
    sweep,
)
from prorl_hpc.observe.evaluation_page import render_versions
from prorl_hpc.policy import publish_policy
from prorl_hpc.recipe import InferenceConfig, Recipe, TaskConfig, load_recipe
from prorl_hpc.run import Run
from tests.prorl_hpc.cli.support import recipe_directory


def recipe() -> Recipe:
    return Recipe(name="r", steps=3, tasks={"a<1>": TaskConfig(kind="logic")})


def site(**placements: Placement) -> Site:
    return Site(name="desk", backend=Backend.local, placements=placements)


def evaluation(job: VersionJob) -> Evaluation:
    """As if a task were solved better with each version; version 2 is damaged."""
    if job.version == 2:
        raise ValueError("w.safetensors is damaged")
    value = Interval(mean=job.version / 10, low=0.0, high=1.0)
    score = TaskScore(
        instances=4, samples=job.num_samples, reward=value, pass_at=dict.fromkeys(job.ks, value),
        response_tokens=7.0, failures=0,
    )  # fmt: skip
    return Evaluation(target=job.target, temperature=0.6, top_p=1.0, tasks={"a<1>": score})


def jobs(*versions: int) -> list[VersionJob]:
    return [
        VersionJob(
            recipe=recipe(), version=version, model=Path("/nowhere"), target=f"r version {version}",
            num_samples=2, ks=(1, 2),
        )
        for version in versions
    ]  # fmt: skip


@pytest.mark.process
def test_each_version_is_a_job_and_a_lost_one_is_a_value(tmp_path: Path) -> None:
    found = sweep(
        jobs(1, 2, 3), site=site(default=Placement(partition="p")), directory=tmp_path, at_once=3,
        timeout_seconds=300.0, function=evaluation,
    )  # fmt: skip
    assert [one.version for one in found] == [1, 2, 3]
    assert found[2].evaluation == evaluation(jobs(3)[0])
    assert found[1].evaluation is None
    assert "w.safetensors is damaged" in found[1].error


def results() -> list[VersionResult]:
    good = [VersionResult(version=n, evaluation=evaluation(jobs(n)[0])) for n in (1, 3)]
    return [good[0], VersionResult(version=2, evaluation=None, error="lost <x>"), good[1]]


def test_json_holds_every_version() -> None:
    data = json.loads(results_json("r", results()))
    assert data["format"] == 1
    assert [one["version"] for one in data["versions"]] == [1, 2, 3]
    assert data["versions"][1] == {"version": 2, "error": "lost <x>"}
    assert data["versions"][2]["tasks"]["a<1>"]["pass_at"]["2"]["mean"] == 0.3


def test_page_draws_a_curve_for_each_k_and_escapes_names() -> None:
    page = render_versions("r<1>", results())
    svgs = [part.split("</svg>")[0] + "</svg>" for part in page.split("<svg")[1:]]
    assert len(svgs) == 3  # pass@1, pass@2, reward
    for svg in svgs:
        ElementTree.fromstring("<svg" + svg)
    assert "r&lt;1&gt;" in page
    assert "a<1>" not in page
    assert "lost &lt;x&gt;" in page


def test_page_of_versions_that_all_failed() -> None:
    page = render_versions("r", [VersionResult(version=2, evaluation=None, error="lost")])
    assert "no values yet" in page
    assert "Not evaluated" in page


def test_evaluations_go_where_rollout_nodes_go_unless_placed() -> None:
    gpu, own = Placement(partition="gpu", cpus_per_node=4), Placement(partition="own")
    both = site(rollout=gpu, evaluation=own)
    assert placed(site(rollout=gpu), recipe()).placement("evaluation").partition == "gpu"
    assert placed(both, recipe()).placement("evaluation").partition == "own"
    assert resources(recipe(), site(rollout=gpu)).cpus_per_node == 4


def test_of_engines_with_jobs_of_their_own_an_evaluation_has_their_gpus() -> None:
    served = recipe()
    served.rollout.cpus_per_node, served.rollout.memory_mib = 16, 1000
    served.inference = InferenceConfig(
        placement=InferencePlacement.own_jobs, gpus_per_node=4, cpus_per_node=8, memory_mib=2000
    )
    cpu, gpu = Placement(partition="cpu"), Placement(partition="gpu")
    where = site(rollout=cpu, inference=gpu)
    assert placed(where, served).placement("evaluation").partition == "gpu"
    found = resources(served, where)
    assert (found.gpus_per_node, found.cpus_per_node, found.memory_mib) == (4, 16, 2000)
    alone = with_engine(served)
    assert alone.rollout.gpus_per_node == 4
    assert alone.inference.placement is InferencePlacement.rollout_nodes


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    groups = recipe_directory(tmp_path / "groups")
    argv = ["submit", "recipe=quickstart", "site=desk", "--recipe-dir", str(groups), "--dry-run"]
    assert main(argv) == 0
    return Run(tmp_path / "runs" / "quickstart")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--versions", "all"], "has published no version yet"),
        (["--versions", "1,2"], "version 1 of run 'quickstart' isn't published; there: none yet"),
        (["--versions", "1,x"], "isn't a list of versions"),
        (["--versions", "1", "--version", "1"], "both given"),
        (["--output", "none/here.json"], "can't be written"),
        (["--output", "."], "is a directory"),
    ],
)
def test_refusals(
    run: Run, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "quickstart", *options]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.process
def test_two_versions_of_a_real_model_end_to_end(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random weights: the numbers are whatever they are, but every file and row is there."""
    from prorl_hpc.learner.warmup import build_from_scratch

    bare = run.root / "bare"
    bare.mkdir()
    build_from_scratch(load_recipe(run.recipe), bare)
    for version in (1, 2):
        publish_policy(
            run, version=version, step=version,
            write=lambda path: shutil.copytree(bare, path, dirs_exist_ok=True) and None,
        )  # fmt: skip
    argv = ["eval", "quickstart", "--versions", "all", "--instances", "1", "--at-once", "2"]
    assert main([*argv, "--output", "out.json"]) == 0, capsys.readouterr().out
    versions = json.loads(Path("out.json").read_text())["versions"]
    assert [one["version"] for one in versions] == [1, 2]
    assert versions[0]["tasks"] == versions[1]["tasks"]  # the same weights and seeds
    assert Path("out.html").read_text().count("<svg") >= 1
    assert "page: out.html" in capsys.readouterr().out


def test_versions_are_refused_for_a_model(run: Run) -> None:
    (run.root.parent / "m").mkdir()
    (run.root.parent / "m" / "config.json").write_text("{}")
    with pytest.raises(UserError):
        from prorl_hpc.cli.evaluate import choose_versions, parser

        choose_versions(parser().parse_args([str(run.root.parent / "m"), "--versions", "all"]))
