"""The policy of any checkpoint as a model directory that transformers loads."""

import shutil
from pathlib import Path

import pytest
import torch

from prorl_hpc.cli.main import main
from prorl_hpc.learner.checkpoint import CheckpointError
from prorl_hpc.learner.export import export_checkpoint
from prorl_hpc.policy import verify_policy

from .conftest import make_run, tiny_recipe
from .loop_helpers import client, go, weights_hash


def test_a_checkpoint_is_exported_as_it_was_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    recipe = tiny_recipe()
    recipe.steps, recipe.learner.keep_policies = 8, 20
    run = make_run(tmp_path / "run", recipe)
    assert go(run, client()) == "done"
    published = weights_hash(run, 4)
    shutil.rmtree(run.policy(4))
    target = tmp_path / "out"
    assert main(["export", str(run.root), str(target), "--step", "4"]) == 0
    assert "version 4, step 4" in capsys.readouterr().out
    assert verify_policy(target).files["model.safetensors"] == published
    model = AutoModelForCausalLM.from_pretrained(target)
    assert torch.isfinite(model(torch.tensor([[5, 6]])).logits).all()

    with pytest.raises(CheckpointError, match=r"step 3 .* has no checkpoint; there: 4, 5, 8"):
        export_checkpoint(run, 3, tmp_path / "three")
    (run.checkpoint(5) / "learner.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"checkpoint of step 5 .* is damaged: learner.json"):
        export_checkpoint(run, 5, tmp_path / "five")
    assert not (tmp_path / "five").exists()


def test_a_checkpoint_is_a_target_of_eval(tmp_path: Path) -> None:
    from prorl_hpc.cli.evaluate import parser
    from prorl_hpc.cli.evaluate_target import find_target

    recipe = tiny_recipe()
    run = make_run(tmp_path / "run", recipe)
    assert go(run, client()) == "done"
    args = parser().parse_args([str(run.checkpoint(recipe.steps))])
    target = find_target(args, scratch=tmp_path)
    assert target.title == f"run step {recipe.steps}"
    assert verify_policy(target.model).step == recipe.steps
