"""Published versions load in transformers, appear whole, and go when they are old or lost."""

from pathlib import Path

import pytest
import torch

from hpc import files
from prorl_hpc import policy
from prorl_hpc.learner.checkpoint import sweep
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.model import PolicyModel, build_policy, gather_weights
from prorl_hpc.learner.publish import publish_start, publish_version, write_export
from prorl_hpc.policy import (
    PolicyError,
    discard_newer,
    keep_newest,
    latest_version,
    published_versions,
    verify_policy,
)
from prorl_hpc.recipe import ModelConfig
from prorl_hpc.run import Run

from .conftest import save_model
from .crash import each_death


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    save_model(run.model_start)
    (run.model_start / "tokenizer.json").write_text("{}")
    return run


@pytest.fixture
def model(run: Run, alone: Ranks) -> PolicyModel:
    return build_policy(run.model_start, ModelConfig(), ranks=alone, chunk_tokens=8)


def publish(run: Run, model: PolicyModel, version: int, *, keep: int = 9) -> None:
    ranks = Ranks(rank=0, world=1, device=torch.device("cpu"))
    publish_version(run, model=model, version=version, ranks=ranks, keep=keep)


def test_transformers_loads_what_was_published(run: Run, model: PolicyModel) -> None:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    publish(run, model, 3)
    loaded = AutoModelForCausalLM.from_pretrained(run.policy(3))
    ours = dict(model.named_weights())
    theirs = dict(loaded.named_parameters())
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert latest_version(run) == 3
    manifest = verify_policy(run.policy(3))
    assert (manifest.version, manifest.step) == (3, 3)
    assert "tokenizer.json" in manifest.files


def test_version_zero_is_the_starting_policy(run: Run) -> None:
    publish_start(run)
    source, copy = (d / "model.safetensors" for d in (run.model_start, run.policy(0)))
    assert source.read_bytes() == copy.read_bytes()
    assert latest_version(run) == 0


def test_old_versions_go_and_the_latest_stays(run: Run, model: PolicyModel) -> None:
    for version in range(5):
        publish(run, model, version, keep=2)
    assert published_versions(run) == [3, 4]
    assert keep_newest(run, 1, protect={3}) == []
    assert discard_newer(run, 3) == [4]


def test_the_same_bytes_stay_and_others_replace(run: Run, model: PolicyModel) -> None:
    publish(run, model, 1)
    inode = run.policy(1).stat().st_ino
    publish(run, model, 1)
    assert run.policy(1).stat().st_ino == inode
    with torch.no_grad():
        next(iter(model.parameters())).add_(1)
    publish(run, model, 1)
    assert run.policy(1).stat().st_ino != inode
    verify_policy(run.policy(1))


def test_damage_is_named(run: Run, model: PolicyModel) -> None:
    publish(run, model, 1)
    weights = run.policy(1) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(PolicyError, match=r"model.safetensors has sha256"):
        verify_policy(run.policy(1))
    weights.unlink()
    with pytest.raises(PolicyError, match=r"model.safetensors can't be read"):
        verify_policy(run.policy(1))
    run.latest_policy.write_text("{")
    with pytest.raises(PolicyError, match="latest can't be read"):
        latest_version(run)


def test_a_full_disk_leaves_nothing_half_made(
    run: Run, model: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(run, model, 1)

    def full(directory: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(policy, "sync_tree", full)
    with pytest.raises(OSError, match=r"version 2 couldn't be published.*No space left"):
        publish(run, model, 2)
    assert sorted(p.name for p in run.policies.iterdir()) == ["latest", "v00000001"]
    assert latest_version(run) == 1


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("replaces", [True, False])
def test_a_death_at_any_point_leaves_a_whole_latest(
    run: Run, model: PolicyModel, monkeypatch: pytest.MonkeyPatch, exchange: bool, replaces: bool
) -> None:
    """Of a new version, and of one that replaces a lost history's of the same number."""
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    publish(run, model, 1)
    if replaces:
        publish(run, model, 2)
    with torch.no_grad():
        next(iter(model.parameters())).add_(1)
    missing = []

    def check() -> None:
        version = latest_version(run)
        assert version is not None
        if run.policy(version).exists():
            verify_policy(run.policy(version))
        else:  # a moment, and only without the exchange; the next attempt publishes it again
            missing.append(version)

    assert each_death(lambda: publish(run, model, 2), check) > 5
    assert latest_version(run) == 2
    assert len(missing) <= (not exchange and replaces)
    sweep(run, report=lambda line: None)
    assert sorted(p.name for p in run.policies.iterdir()) == ["latest", "v00000001", "v00000002"]


def test_newer_formats_are_refused(run: Run, model: PolicyModel) -> None:
    publish(run, model, 1)
    manifest = run.policy(1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(PolicyError, match="format 9, newer"):
        verify_policy(run.policy(1))


def test_an_export_outlives_every_clean_up(run: Run, model: PolicyModel, alone: Ranks) -> None:
    target = run.root / "export" / "step-7"
    weights = gather_weights(model, dtype=model.dtype, ranks=alone)
    write_export(run, weights, version=8, step=7, target=target)
    assert verify_policy(target).step == 7
    assert latest_version(run) is None
