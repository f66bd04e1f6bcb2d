"""`prorl-hpc submit` without a scheduler: composing, dry runs, refusals; nothing is started."""

import importlib.metadata
import json
import re
import socket
import stat
from pathlib import Path

import pytest
import yaml

from hpc import ledger
from prorl_hpc import __version__
from prorl_hpc.cli.main import main
from prorl_hpc.cli.submit import compose_recipe, submit
from prorl_hpc.recipe import load_recipe
from prorl_hpc.run import Run
from tests.prorl_hpc.cli.support import recipe_directory

GOLDEN = Path(__file__).parents[2] / "golden" / "quickstart.yaml"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line that composes the quickstart on a site of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    groups = recipe_directory(tmp_path / "groups")
    return ["submit", "recipe=quickstart", "site=desk", "--recipe-dir", str(groups)]


def test_cfg_prints_the_composed_recipe(
    base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*base, "--cfg", "run_root=/"]) == 0
    text = capsys.readouterr().out
    # When the shipped recipe is changed on purpose, this file is that output.
    assert yaml.safe_load(text) == yaml.safe_load(GOLDEN.read_text())


def test_dry_run_writes_the_run_and_starts_nothing(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*base, "--dry-run", "rollout.nodes=3", "--name", "first"]) == 0
    out = capsys.readouterr().out
    run = Run(tmp_path / "runs" / "first")
    assert "node-hours" in out
    assert load_recipe(run.recipe).rollout.nodes == 3
    assert {path.stem for path in run.scripts.iterdir()} == {"buffer", "rollout", "learner"}
    assert stat.S_IMODE(run.secrets.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in run.secrets.iterdir())
    origin = json.loads(run.provenance.read_text())
    assert origin["command"].startswith("prorl-hpc submit recipe=quickstart")
    assert origin["overrides"] == ["recipe=quickstart", "site=desk", "rollout.nodes=3"]
    assert origin["host"] == socket.gethostname()
    assert origin["prorl_hpc"] == __version__
    assert origin["packages"]["hydra-core"] == importlib.metadata.version("hydra-core")
    if origin["git"] is not None:  # a checkout
        assert re.fullmatch(r"[0-9a-f]{40}", origin["git"]["commit"])
    assert "sbatch" in run.readme.read_text()
    assert not run.ledger.exists()
    assert (run.logs / "learner").is_dir()


def test_run_that_was_never_started_may_change(base: list[str], tmp_path: Path) -> None:
    assert main([*base, "--dry-run", "steps=5"]) == 0
    keys = (tmp_path / "runs/quickstart/secrets/curve-server.json").read_bytes()
    assert main([*base, "--dry-run", "steps=6"]) == 0
    assert load_recipe(tmp_path / "runs/quickstart/recipe.yaml").steps == 6
    assert (tmp_path / "runs/quickstart/secrets/curve-server.json").read_bytes() == keys


def test_started_run_keeps_its_recipe(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*base, "--dry-run", "steps=5"]) == 0
    run = Run(tmp_path / "runs" / "quickstart")
    entry = ledger.Intent(time=0.0, job="buffer", token="t", script="buffer.sbatch")
    ledger.append(run.ledger, entry=entry)
    frozen = run.provenance.read_bytes()
    assert main([*base, "--dry-run", "steps=5"]) == 0
    assert run.provenance.read_bytes() == frozen
    capsys.readouterr()
    assert main([*base, "--dry-run", "steps=6"]) == 2
    assert "steps: 5 there, 6 here" in capsys.readouterr().err


def test_submit_of_a_run_that_has_ended_says_how(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*base, "--dry-run"]) == 0
    run = Run(tmp_path / "runs" / "quickstart")
    for job, next_ in (("buffer", "cancelled"), ("learner", "failed"), ("rollout", "cancelled")):
        indexes = "0-1" if job == "rollout" else None
        entry = ledger.Submit(time=1.0, job=job, token="", job_id="local-1", indexes=indexes)
        ledger.append(run.ledger, entry=entry)
        for index in ledger.parse_indexes(indexes):
            start = ledger.Start(
                time=2.0, job=job, role=job, index=index, attempt=1, job_id="local-1", host="n1"
            )
            end = ledger.Exit(
                time=3.0, job=job, index=index, attempt=1, code=1, next=next_, reason="by test"
            )
            for entry_ in (start, end):
                ledger.append(run.ledger, entry=entry_)
    before = run.ledger.read_bytes()
    capsys.readouterr()
    assert main(base) == 0
    out = capsys.readouterr().out
    assert "was started before and isn't running: learner attempt 1 failed on n1: by test" in out
    assert run.ledger.read_bytes() == before


def test_data_and_run_root_become_absolute(base: list[str], tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    overrides = ["recipe=quickstart", "site=desk", "tasks.spell_backward.data=p.jsonl"]
    recipe = compose_recipe(overrides, recipe_dir=Path(base[-1]), name=None)
    assert recipe.tasks["spell_backward"].data == str(tmp_path / "p.jsonl")
    assert recipe.run_root == str(tmp_path / "runs")


def test_runs_are_made_where_they_are_looked_up(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_RUN_ROOT", str(tmp_path / "elsewhere"))
    overrides = ["recipe=quickstart", "site=desk"]
    recipe = compose_recipe(overrides, recipe_dir=Path(base[-1]), name=None)
    assert recipe.run_root == str(tmp_path / "elsewhere")
    chosen = compose_recipe([*overrides, "run_root=mine"], recipe_dir=Path(base[-1]), name=None)
    assert chosen.run_root == str(tmp_path / "mine")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.path=/nowhere/model"], "model.path='/nowhere/model' doesn't exist"),
        (["model.path=null", "model.vocabulary=null"], "choose model=tiny"),
        (["tasks.spell_backward.kind=logik"], "did you mean 'logic'"),
        (["tasks.spell_backward.data=none.jsonl"], "can't be read: No such file"),
        (["tasks.spell_backward.data=empty.jsonl"], "is empty"),
        (["tasks.spell_backward.data=blank.jsonl"], "only blank lines"),
        (["tasks.spell_backward.data=broken.jsonl"], "first line isn't JSON"),
        (["learner.nodes=5"], "learner.nodes=5 exceeds 4"),
        (["rollout.nodes=400"], "rollout.nodes=400 exceeds 4"),
        (["site.max_node_hours=0.5"], "site.max_node_hours=0.5"),
        (["learner.memory_mib=20000"], "learner.memory_mib=20000 exceeds"),
        (["--name", "a/b"], "name='a/b' can't name a run"),
        (["--name", ""], "name='' can't name a run"),
        (["learner.gpus_per_node=2", "learner.ranks_per_node=3"], "give each rank a GPU"),
        (["steps"], "write key=value, e.g. steps=..."),
        (["countdown"], "e.g. task=countdown"),
        (["nonsense"], "e.g. recipe=logic"),
        (["algorithm.batch_groups=7", "algorithm.updates_per_step=2"], "isn't divisible"),
        (["rollout.engine.kind=openai"], "rollout.engine.urls=[http://host:8000/v1]"),
        (
            ["rollout.engine.kind=openai", "rollout.engine.urls=['http://127.0.0.1:9/v1']"],
            "rollout.engine.kind=openai can't train",
        ),
        (["+tasks.spell_backward.top_p=0.9"], "top_p"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    base: list[str],
    overrides: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "broken.jsonl").write_text("{'problem'\n")
    assert main([*base, "--dry-run", *overrides]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_model_that_is_not_there_is_a_note_in_a_dry_run_and_refused_for_real(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*base, "--dry-run", "model.path=some/model"]) == 0
    assert "hf download some/model" in capsys.readouterr().out
    assert main([*base, "model.path=some/model"]) == 2
    assert "hf download some/model" in capsys.readouterr().err
    assert not Run(tmp_path / "runs" / "quickstart").ledger.exists()


def test_path_with_spaces_and_quotes(base: list[str], tmp_path: Path) -> None:
    root = tmp_path / 'it\'s "my" runs'
    overrides = ["recipe=quickstart", "site=desk"]
    recipe = compose_recipe(overrides, recipe_dir=Path(base[-1]), name=None)
    recipe.run_root = str(root)
    run, _ = submit(recipe, argv=[], overrides=overrides, dry_run=True)
    assert run.root == root / "quickstart"
    assert len(list(run.scripts.iterdir())) == 3


def test_run_root_that_cannot_be_made(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([*base, "--dry-run", "run_root=file"]) == 2
    assert "can't be made" in capsys.readouterr().err
