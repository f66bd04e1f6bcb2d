"""What is evaluated: a run's version, its checkpoint or a model; its own tasks or a suite's."""

import json
import shutil
from pathlib import Path

import pytest

from hpc.files import asset_directory
from prorl_hpc.cli.evaluate import parser
from prorl_hpc.cli.evaluate_target import find_target, recipe_of_run
from prorl_hpc.cli.main import main
from prorl_hpc.compose import compose_suite
from prorl_hpc.learner.warmup import build_from_scratch
from prorl_hpc.policy import publish_policy
from prorl_hpc.recipe import load_recipe
from prorl_hpc.records import Kind
from prorl_hpc.run import Run
from prorl_hpc.tasks.registry import make_tasks
from tests.prorl_hpc.cli.support import recipe_directory

NUM_ROWS = 3


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run with one published version of random weights, and `problems.jsonl` beside it."""
    monkeypatch.chdir(tmp_path)
    groups = recipe_directory(tmp_path / "groups")
    argv = ["submit", "recipe=quickstart", "site=desk", "--recipe-dir", str(groups), "--dry-run"]
    assert main(argv) == 0
    run = Run(tmp_path / "runs" / "quickstart")
    bare = tmp_path / "bare"
    bare.mkdir()
    build_from_scratch(load_recipe(run.recipe), bare)
    publish_policy(
        run, version=1, step=1,
        write=lambda path: shutil.copytree(bare, path, dirs_exist_ok=True) and None,
    )  # fmt: skip
    rows = [{"problem": f"{n}+{n}", "answer": 2 * n} for n in range(NUM_ROWS)]
    Path("problems.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return run


def test_a_suite_replaces_the_tasks_of_a_run_and_nothing_else(run: Run) -> None:
    args = parser().parse_args(["quickstart", "suite=file", "validation.temperature=0.3"])
    frozen, recipe = load_recipe(run.recipe), recipe_of_run(run, args)
    assert list(recipe.tasks) == ["math"]
    assert recipe.tasks["math"].weight == 0.0
    assert recipe.validation.temperature == 0.3
    assert (recipe.model, recipe.rollout) == (frozen.model, frozen.rollout)
    assert make_tasks(recipe)["math"].size(Kind.validation) == NUM_ROWS


def test_all_rows_of_a_file_are_measured_on(run: Run) -> None:
    assert main(["eval", "quickstart", "suite=file", "--output", "out.json"]) == 0
    result = json.loads(Path("out.json").read_text())
    assert result["tasks"]["math"]["instances"] == NUM_ROWS
    assert (result["target"], result["temperature"]) == ("quickstart version 1", 0.6)


def test_a_version_that_lies_in_its_run_has_the_runs_recipe(run: Run, tmp_path: Path) -> None:
    args = parser().parse_args([str(run.policy(1))])
    target = find_target(args, scratch=tmp_path)
    assert target.recipe == load_recipe(run.recipe)
    assert target.model == run.policy(1)


def test_a_model_takes_a_suite_or_a_recipe(run: Run, tmp_path: Path) -> None:
    suite = find_target(parser().parse_args(["bare", "suite=puzzles"]), scratch=tmp_path)
    assert len(suite.recipe.tasks) == 5
    recipe = find_target(parser().parse_args(["bare", "recipe=logic"]), scratch=tmp_path)
    assert recipe.recipe.name == "logic"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["quickstart", "seed=1"], "for other tasks add suite=NAME"),
        (["quickstart", "suite=fil"], "suite=fil is unknown; did you mean suite=file?"),
        (["quickstart", "suite=file", "model.path=x"], "override 'model.path=x': beside suite"),
        (["quickstart", "suite=file", "tasks.math.data=none.jsonl"], "none.jsonl' can't be read"),
        (["quickstart", "suite=benchmarks"], "PRORL_BENCHMARKS"),
        (["bare"], "is a model; name the tasks too"),
        (["bare", "suite=file", "recipe=logic"], "doesn't go with suite=...; give one of them"),
        (["runs/quickstart/checkpoints/step-00000009"], "step 9 of run 'quickstart' has no check"),
    ],
)
def test_refusals(
    run: Run, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *argv]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_suite_is_no_recipe(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "recipe=quickstart", "suite=file", "--dry-run"]) == 2
    assert "a suite is for prorl-hpc eval" in capsys.readouterr().err


def test_every_shipped_suite_makes_its_tasks(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRORL_BENCHMARKS", str(tmp_path))
    rows = {
        "aime": {"problem": "1+1", "answer": "2"},
        "math500": {"problem": "1+1", "answer": "2"},
        "problems": {"problem": "1+1", "answer": "2"},
        "gpqa": {"question": "?", "options": ["a", "b"], "answer": "A"},
        "ifeval": {"prompt": "Hi", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    }
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    suites = sorted((asset_directory("recipes") / "suite").glob("*.yaml"))
    assert len(suites) >= 4
    for path in suites:
        recipe = compose_suite([f"suite={path.stem}"])
        for task in recipe.tasks.values():
            task.weight = 0.0
        assert all(task.size(Kind.validation) for task in make_tasks(recipe).values())
