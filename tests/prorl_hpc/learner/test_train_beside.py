"""What the loop writes and reads beside training, against a fake buffer."""

import threading
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.learner import output
from prorl_hpc.learner.checkpoint import checkpoint_steps, read_state
from tests.fakes.learner_client import FakeClient

from .conftest import make_run, tiny_recipe
from .loop_helpers import client, go, told, weights_hash


def test_what_is_validated_has_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long writing beside training takes: a crash must not validate a version twice."""
    recipe = tiny_recipe(max_staleness=50)
    recipe.learner.deterministic = False
    run = make_run(tmp_path / "run", recipe)
    fake = client()
    real, asked = output.write_checkpoint, threading.Event()

    def slow(*args: Any, **settings: Any) -> Path:
        asked.wait(timeout=0.5)  # a validation that is asked for before ends this wait, and fails
        return real(*args, **settings)

    def validate(version: int, counts: dict[str, int], num_rollouts: int) -> None:
        whole = version in (0, *checkpoint_steps(run))
        if version:
            asked.set()
        assert whole

    monkeypatch.setattr(output, "write_checkpoint", slow)
    fake.validate = validate  # type: ignore[method-assign]
    assert go(run, fake) == "done"
    assert asked.is_set()


def test_publishing_every_second_step_resumes_with_a_fresh_version(tmp_path: Path) -> None:
    recipe = tiny_recipe(max_staleness=2)
    recipe.steps = 6
    recipe.learner.deterministic = False
    recipe.learner.publish_every_steps = 2
    run = make_run(tmp_path / "run", recipe)
    fake = client()
    go(run, fake, stop=lambda: "now" if ("filtered", 0) in fake.calls else None)
    assert fake.version == 0
    again = client()
    assert go(run, again) == "done"
    assert told(again, "announce") == [(1, 8, 0, 1)]
    assert told(again, "published") == [2, 4, 5, 6]


def test_reading_publishing_and_saving_beside_training_change_nothing(tmp_path: Path) -> None:
    """Overlapped and stopped twice against the deterministic run; exports at their own steps."""
    recipe = tiny_recipe(max_staleness=0)
    whole = make_run(tmp_path / "whole", recipe)
    assert go(whole, client()) == "done"
    recipe.learner.deterministic = False
    recipe.learner.export_every_steps = 5
    recipe.algorithm.max_staleness = 50
    beside = make_run(tmp_path / "beside", recipe)
    for version in (3, 7):
        part = client()

        def stop(part: FakeClient = part, version: int = version) -> str | None:
            return "the walltime is near" if part.version >= version else None

        assert go(beside, part, stop=stop) == "the walltime is near"
    fake = client()
    assert go(beside, fake) == "done"
    assert weights_hash(beside, 12) == weights_hash(whole, 12)
    assert list(read_state(beside.checkpoint(12)).consumed.ranges) == [(0, 96)]
    assert told(fake, "published")[-1] == 12
    exported = sorted(path.name for path in (beside.root / "export").iterdir())
    assert exported == ["step-00000005", "step-00000010", "step-00000012"]


@pytest.mark.parametrize("what", ["policy", "checkpoint"])
def test_what_cannot_be_written_beside_training_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    recipe = tiny_recipe(max_staleness=50)
    recipe.learner.deterministic = False
    run = make_run(tmp_path / "run", recipe)

    def full(*args: object, **settings: object) -> None:
        raise OSError(28, "No space left on device")

    place = {"policy": "write_version", "checkpoint": "write_checkpoint"}[what]
    monkeypatch.setattr(output, place, full)
    with pytest.raises(OSError, match="No space left"):
        go(run, client())
    assert threading.active_count() == 1 or not [
        t for t in threading.enumerate() if t.name in ("publish", "checkpoint", "next-batch")
    ]
