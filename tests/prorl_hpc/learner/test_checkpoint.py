"""Checkpoints: bit for bit, damaged ones passed over, newer ones refused, nothing half-made."""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from hpc import files
from prorl_hpc.buffer.messages import GroupIds
from prorl_hpc.learner import checkpoint
from prorl_hpc.learner.checkpoint import (
    CheckpointError,
    LearnerState,
    checkpoint_steps,
    keep_last,
    load_newest,
    restore,
    save_checkpoint,
)
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.filtering import EffectiveSamples
from prorl_hpc.learner.model import PolicyModel, build_policy
from prorl_hpc.learner.optimizer import build_optimizer
from prorl_hpc.learner.reference import Reference
from prorl_hpc.recipe import AlgorithmConfig, ModelConfig
from prorl_hpc.run import Run

from .conftest import save_model
from .crash import each_death

Save = Callable[[int], Path]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run with 'quotes'")


@pytest.fixture
def model(tmp_path: Path, alone: Ranks) -> PolicyModel:
    return build_policy(save_model(tmp_path / "m"), ModelConfig(), ranks=alone, chunk_tokens=8)


@pytest.fixture
def optimizer(model: PolicyModel) -> torch.optim.Optimizer:
    optimizer = build_optimizer(model.parameters(), config=AlgorithmConfig())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizer.step()
    return optimizer


@pytest.fixture
def reference(model: PolicyModel, alone: Ranks) -> Reference:
    return Reference.of(model, index=2, step=5, ranks=alone)


@pytest.fixture
def save(
    run: Run, model: PolicyModel, optimizer: torch.optim.Optimizer, reference: Reference,
    alone: Ranks,
) -> Save:  # fmt: skip
    def at(step: int) -> Path:
        return save_checkpoint(
            run, state_at(step, reference), model=model, optimizer=optimizer, reference=reference,
            ranks=alone,
        )  # fmt: skip

    return at


def state_at(step: int, reference: Reference | None) -> LearnerState:
    return LearnerState(
        step=step,
        version=step,
        consumed=GroupIds.of([0, 1, 2, 7]),
        filtered=1,
        samples=EffectiveSamples(seen_groups=4, kept_groups=3),
        reset={"format": 1},
        reference=reference.identity if reference else None,
        has_moments=True,
        last_kl=0.25,
        rng=checkpoint.rng_text(),
    )


def everything(model: PolicyModel, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [v for p in model.parameters() for v in optimizer.state[p].values()]
    return [p.detach().clone() for p in model.parameters()] + [m.clone() for m in moments]


def test_what_is_loaded_is_what_was_saved(
    run: Run, save: Save, model: PolicyModel, optimizer: torch.optim.Optimizer,
    reference: Reference, alone: Ranks,
) -> None:  # fmt: skip
    save(5)
    before, drawn = everything(model, optimizer), torch.rand(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer.state.clear()
    found = load_newest(run, ranks=alone, report=pytest.fail)
    assert found is not None
    path, state = found
    assert (state.step, state.last_kl, state.samples.kept_groups) == (5, 0.25, 3)
    assert list(state.consumed) == [0, 1, 2, 7]
    again = restore(path, state, model=model, optimizer=optimizer, with_reference=True, ranks=alone)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(model, optimizer), strict=True))
    assert torch.equal(torch.rand(3), drawn)
    assert again is not None
    assert again.identity == reference.identity
    assert all(torch.equal(again.tensors[n], t) for n, t in reference.tensors.items())


@pytest.mark.parametrize("victim", ["learner.json", "manifest.json", "tensors"])
def test_a_damaged_newest_falls_back_with_one_line(
    run: Run, save: Save, alone: Ranks, victim: str
) -> None:
    save(5)
    newest = save(6)
    target = newest / victim
    if target.is_dir():
        target = max(target.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 0xFF
    target.write_bytes(bytes(data))
    lines: list[str] = []
    found = load_newest(run, ranks=alone, report=lines.append)
    assert found is not None
    assert found[1].step == 5
    (line,) = lines
    assert "step-00000006 is damaged" in line
    assert checkpoint_steps(run) == [5]


def test_all_damaged_means_none(run: Run, save: Save, alone: Ranks) -> None:
    (save(5) / "learner.json").unlink()
    assert load_newest(run, ranks=alone, report=lambda line: None) is None


def test_a_newer_format_is_refused(run: Run, save: Save, alone: Ranks) -> None:
    path = save(5)
    manifest = msgspec.json.decode((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_bytes(msgspec.json.encode(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99, newer"):
        load_newest(run, ranks=alone, report=pytest.fail)


def test_a_reference_of_another_identity_is_refused(
    run: Run, save: Save, model: PolicyModel, optimizer: torch.optim.Optimizer, alone: Ranks
) -> None:
    path = save(5)
    state = checkpoint.read_state(path)
    assert state.reference is not None
    wrong = msgspec.structs.replace(
        state, reference=msgspec.structs.replace(state.reference, sha256="0" * 64)
    )
    with pytest.raises(ValueError, match="reference 2 of step 5"):
        restore(path, wrong, model=model, optimizer=optimizer, with_reference=True, ranks=alone)


def test_a_failed_save_leaves_the_old_one_and_no_rubbish(
    run: Run, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(5)
    before = (path / "manifest.json").read_bytes()

    def full(directory: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "sync_tree", full)
    with pytest.raises(OSError, match="No space left"):
        save(5)
    assert (path / "manifest.json").read_bytes() == before
    assert [entry.name for entry in run.checkpoints.iterdir()] == ["step-00000005"]


def test_a_crash_while_the_old_one_is_removed_leaves_the_new_one(
    run: Run, save: Save, alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(5)
    old = (path / "learner.json").stat().st_ino

    def crash(directory: Path, ignore_errors: bool = False) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", crash)
        with pytest.raises(KeyboardInterrupt):
            save(5)
    lines: list[str] = []
    found = load_newest(run, ranks=alone, report=lines.append)
    assert found is not None
    assert (found[0] / "learner.json").stat().st_ino != old
    # What the crash has left is gone, and told of.
    assert [entry.name for entry in run.checkpoints.iterdir()] == ["step-00000005"]
    assert "removed 1 unfinished" in lines[0]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_death_at_any_point_leaves_a_whole_checkpoint(
    run: Run, save: Save, alone: Ranks, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """Also of the only one there is, and where the file system can't swap two names."""
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    save(5)

    def check() -> None:
        found = load_newest(run, ranks=alone, report=lambda line: None)
        assert found is not None
        assert found[1].step == 5
        assert [entry.name for entry in run.checkpoints.iterdir()] == ["step-00000005"]

    assert each_death(lambda: save(5) and None, check) > 10


def test_removed_checkpoints_do_not_come_back(run: Run, save: Save, alone: Ranks) -> None:
    save(5)
    save(6)

    def check() -> None:
        found = load_newest(run, ranks=alone, report=lambda line: None)
        assert found is not None
        assert found[1].step == 6
        assert len(list(run.checkpoints.iterdir())) == len(checkpoint_steps(run))

    each_death(lambda: keep_last(run, 1) and None, check)
    assert checkpoint_steps(run) == [6]


def test_saving_a_step_again_replaces_it_and_old_ones_go(run: Run, save: Save) -> None:
    for step in (1, 2, 3, 4, 4):
        save(step)
    assert keep_last(run, 2, protect=(1, None)) == [2]
    assert checkpoint_steps(run) == [1, 3, 4]
