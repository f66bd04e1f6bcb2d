"""The reference: equal at a reset, unchanged by training, exchanged and brought back exactly."""

from pathlib import Path

import pytest
import torch

from prorl_hpc.choices import ReferencePlacement
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.model import PolicyModel, build_policy
from prorl_hpc.learner.reference import Reference, ReferenceMismatch, hash_tensors
from prorl_hpc.recipe import ModelConfig

from .conftest import save_model


@pytest.fixture
def model(tmp_path: Path, alone: Ranks) -> PolicyModel:
    return build_policy(save_model(tmp_path / "m"), ModelConfig(), ranks=alone, chunk_tokens=8)


def weights(model: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_weights()}


def test_exchange_is_exact_and_undone(model: PolicyModel, alone: Ranks) -> None:
    reference = Reference.of(model, index=0, step=0, ranks=alone)
    start = weights(model)
    with torch.no_grad():
        for _, parameter in model.named_weights():
            parameter.add_(1.0)
    trained = weights(model)
    with reference.in_place(model):
        assert all(torch.equal(p, start[name]) for name, p in model.named_weights())
    assert all(torch.equal(p, trained[name]) for name, p in model.named_weights())
    reference.verify(ranks=alone)


def test_exchange_is_undone_after_an_error(model: PolicyModel, alone: Ranks) -> None:
    reference = Reference.of(model, index=0, step=0, ranks=alone)
    with torch.no_grad():
        next(iter(model.parameters())).add_(1.0)
    trained = weights(model)
    with pytest.raises(KeyError), reference.in_place(model):
        raise KeyError
    assert all(torch.equal(p, trained[name]) for name, p in model.named_weights())


def test_the_place_of_the_reference_changes_nothing(model: PolicyModel, alone: Ranks) -> None:
    here = Reference.of(model, index=1, step=2, ranks=alone)
    there = Reference.of(model, index=1, step=2, ranks=alone, placement=ReferencePlacement.cpu)
    assert here.identity == there.identity
    start = weights(model)
    with torch.no_grad():
        for _, parameter in model.named_weights():
            parameter.add_(1.0)
    trained = weights(model)
    for reference in (here, there):
        with reference.in_place(model):
            assert all(torch.equal(p, start[name]) for name, p in model.named_weights())
        assert all(torch.equal(p, trained[name]) for name, p in model.named_weights())
        reference.verify(ranks=alone)


def test_a_changed_reference_is_refused(model: PolicyModel, alone: Ranks) -> None:
    reference = Reference.of(model, index=3, step=40, ranks=alone)
    reference.tensors["model.norm.weight"][0] += 1e-7
    with pytest.raises(ReferenceMismatch, match="reference 3 of step 40"):
        reference.verify(ranks=alone)


def test_hash_depends_on_names_and_values_not_on_order(alone: Ranks) -> None:
    a, b = torch.ones(2), torch.zeros(2)
    assert hash_tensors({"x": a, "y": b}, ranks=alone) == hash_tensors(
        {"y": b, "x": a}, ranks=alone
    )
    assert hash_tensors({"x": a, "y": b}, ranks=alone) != hash_tensors(
        {"x": b, "y": a}, ranks=alone
    )
