"""Where the reference lies changes no bit of a run, nor does a move; without KL there is none."""

from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from prorl_hpc.choices import ReferencePlacement
from prorl_hpc.learner import session
from prorl_hpc.learner.checkpoint import read_state
from prorl_hpc.observe.metrics import read_metrics
from prorl_hpc.policy import read_manifest
from prorl_hpc.recipe import Recipe, dump_recipe
from prorl_hpc.run import Run
from tests.fakes.learner_client import FakeClient

from .conftest import VOCABULARY, make_run, tiny_recipe


def recipe_with(placement: ReferencePlacement, *, kl_coef: float = 1e-3) -> Recipe:
    recipe = tiny_recipe(kl_coef=kl_coef)
    recipe.steps = 6
    recipe.algorithm.reset.every_steps = 3
    recipe.learner.checkpoint_every_steps = 2
    recipe.learner.reference_placement = placement
    return recipe


def go(run: Run, *, stop_after: int = 10_000) -> str:
    fake = FakeClient(vocabulary=VOCABULARY)
    left = iter(range(stop_after))
    return session.train(
        run,
        connect=lambda patience_seconds: fake,
        read=fake.read,
        stop_reason=lambda: None if next(left, None) is not None else "stopped by the test",
    )


def kl_by_step(run: Run) -> dict[int, float]:
    rows = read_metrics(run.metrics("learner"))
    return {row["step"]: row["kl"] for row in rows if row["event"] == "step"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ReferencePlacement.cpu, ReferencePlacement.cpu),
        (ReferencePlacement.device, ReferencePlacement.cpu),
        (ReferencePlacement.cpu, ReferencePlacement.device),
    ],
)
def test_the_same_weights_and_kl(
    tmp_path: Path, first: ReferencePlacement, second: ReferencePlacement
) -> None:
    expected = make_run(tmp_path / "expected", recipe_with(ReferencePlacement.device))
    assert go(expected) == "done"
    moved = make_run(tmp_path / "moved", recipe_with(first))
    assert go(moved, stop_after=4) == "stopped by the test"
    moved.recipe.write_text(dump_recipe(recipe_with(second)))
    assert go(moved) == "done"
    hashes = [read_manifest(run.policy(6)).files["model.safetensors"] for run in (expected, moved)]
    assert hashes[0] == hashes[1]
    assert kl_by_step(moved) == kl_by_step(expected)
    states = [read_state(run.checkpoint(6)) for run in (expected, moved)]
    assert states[0].reference == states[1].reference
    assert states[0].reference is not None


def test_without_kl_nothing_of_a_reference_exists(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", recipe_with(ReferencePlacement.cpu, kl_coef=0.0))
    assert go(run) == "done"
    assert read_state(run.checkpoint(6)).reference is None
    held = FileSystemReader(run.checkpoint(6) / "tensors").read_metadata().state_dict_metadata
    assert held
    assert not any(name.startswith("reference/") for name in held)
