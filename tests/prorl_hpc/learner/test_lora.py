"""Adapters: what they train, merge into and look like to peft; resets, resume, two ranks."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from prorl_hpc.choices import ReferencePlacement
from prorl_hpc.learner import session
from prorl_hpc.learner.attention import document_layout
from prorl_hpc.learner.checkpoint import read_state
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.lora import LoraError
from prorl_hpc.learner.model import PolicyModel, build_policy, gather_adapter, gather_weights
from prorl_hpc.learner.objective import objective_config
from prorl_hpc.learner.optimizer import build_optimizer
from prorl_hpc.learner.space import full_disk
from prorl_hpc.learner.step import Stepper
from prorl_hpc.learner.weights import open_weights, save_weights
from prorl_hpc.observe.metrics import read_metrics
from prorl_hpc.policy import read_manifest
from prorl_hpc.recipe import AlgorithmConfig, LoraConfig, ModelConfig, Recipe
from prorl_hpc.run import Run
from tests.fakes.learner_client import FakeClient

from .conftest import VOCABULARY, make_run, save_model, tiny_recipe
from .test_distributed import train_with
from .test_step import batch, run

pytest.importorskip("peft")

LORA = LoraConfig(rank=4, alpha=8.0)


def adapted(directory: Path, ranks: Ranks, **settings: object) -> PolicyModel:
    config = ModelConfig(**({"lora": LORA} | settings))  # type: ignore[arg-type]
    return build_policy(directory, config, ranks=ranks, chunk_tokens=16)


def stepper_of(model: PolicyModel, ranks: Ranks, **algorithm: object) -> Stepper:
    config = AlgorithmConfig(**({"learning_rate": 1e-2, "kl_coef": 1e-2} | algorithm))  # type: ignore[arg-type]
    stepper = Stepper(
        model=model,
        optimizer=build_optimizer([p for _, p in model.named_weights()], config=config),
        algorithm=config,
        objective=objective_config(config, max_new_tokens=8),
        ranks=ranks,
        tokens_per_micro_batch=64,
    )
    stepper.renew_reference(index=0, step=0)
    return stepper


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base")


def test_the_policy_begins_as_its_base_bit_for_bit(directory: Path, alone: Ranks) -> None:
    model = adapted(directory, alone)
    merged = gather_weights(model, dtype=torch.float32, ranks=alone)
    stored = open_weights(directory)
    assert sorted(merged) == stored.names()
    assert all(torch.equal(merged[name], stored.get(name)) for name in merged)
    plain = build_policy(directory, ModelConfig(), ranks=alone, chunk_tokens=16)
    assert torch.equal(logprobs(model), logprobs(plain))
    assert sum(p.numel() for _, p in model.named_weights()) < sum(
        p.numel() for _, p in plain.named_weights()
    )


def test_only_adapters_are_trained_and_held(directory: Path, alone: Ranks) -> None:
    model = adapted(directory, alone)
    # Two layers of seven linear ones, A and B each.
    names = [name for name, _ in model.named_weights()]
    assert len(names) == 2 * 7 * 2
    assert all("lora_" in name for name in names)
    before = {stored: p.detach().clone() for stored, _, p in model.named_stored()}
    stepper = stepper_of(model, alone)
    assert stepper.reference is not None
    assert list(stepper.reference.tensors) == names
    run(stepper, batch())
    assert len(stepper.optimizer.state) == len(names)
    assert all(torch.equal(p, before[stored]) for stored, _, p in model.named_stored())
    # B leaves zero at the first step, A follows at the second.
    assert any(float(p.detach().abs().max()) > 0 for n, p in model.named_weights() if "lora_B" in n)


def test_merged_weights_are_the_policy(directory: Path, alone: Ranks, tmp_path: Path) -> None:
    model = adapted(directory, alone)
    stepper = stepper_of(model, alone)
    for step in range(3):
        run(stepper, batch(), step=step)
    save_weights(gather_weights(model, dtype=torch.float32, ranks=alone), directory)
    merged = build_policy(directory, ModelConfig(), ranks=alone, chunk_tokens=16)
    assert logprobs(merged).allclose(logprobs(model), atol=1e-5)
    plain = build_policy(
        save_model(tmp_path / "again"), ModelConfig(), ranks=alone, chunk_tokens=16
    )
    assert not logprobs(plain).allclose(logprobs(model), atol=1e-3)


def logprobs(model: PolicyModel) -> torch.Tensor:
    tokens = torch.arange(14)
    heat = torch.ones(13)
    with torch.no_grad():
        found: torch.Tensor = model(
            tokens, document_layout([14]), torch.arange(13), tokens[1:], heat
        ).logprobs
    return found


def test_a_gradient_of_the_factors_by_hand(directory: Path, alone: Ranks) -> None:
    """dL/dB = s G A^T and dL/dA = s B^T G, with G the gradient of the whole weight."""
    model = adapted(directory, alone)
    with torch.no_grad():
        for name, parameter in model.named_weights():
            if "lora_B" in name:
                parameter.fill_(0.01)
    merged = gather_weights(model, dtype=torch.float32, ranks=alone)
    save_weights(merged, directory)
    whole = build_policy(directory, ModelConfig(), ranks=alone, chunk_tokens=16)
    for network in (model, whole):
        tokens = torch.arange(14)
        network(
            tokens, document_layout([14]), torch.arange(13), tokens[1:], torch.ones(13)
        ).logprobs.sum().backward()
    gradients = {name: p.grad for name, p in whole.named_weights()}
    factors = dict(model.named_weights())
    layer = "model.layers.1.mlp.down_proj"
    g, a, b = (
        gradients[f"{layer}.weight"],
        factors[f"{layer}.lora_A.default.weight"],
        factors[f"{layer}.lora_B.default.weight"],
    )
    assert g is not None
    assert a.grad is not None
    assert b.grad is not None
    s = 8.0 / 4
    assert torch.allclose(b.grad, s * g @ a.detach().T, atol=1e-4)
    assert torch.allclose(a.grad, s * b.detach().T @ g, atol=1e-4)


def test_kl_is_zero_after_a_reset_and_the_reference_is_the_policy(
    directory: Path, alone: Ranks
) -> None:
    stepper = stepper_of(adapted(directory, alone), alone, updates_per_step=2)
    samples = batch()
    rewards = [s.reward for s in samples]
    assert stepper.run(samples, rewards, step=0).kl == 0.0
    assert (stepper.run(samples, rewards, step=1).kl or 0) > 0
    stepper.renew_reference(index=1, step=2)
    assert stepper.run(samples, rewards, step=2).kl == 0.0


def test_peft_loads_the_adapter_with_the_same_logits(
    directory: Path, alone: Ranks, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = adapted(directory, alone)
    stepper = stepper_of(model, alone)
    for step in range(3):
        run(stepper, batch(), step=step)
    adapter = gather_adapter(model, ranks=alone)
    assert adapter is not None
    adapter.write(tmp_path / "adapter", base=directory)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["bias"]) == (4, 8.0, "none")
    assert settings["peft_type"] == "LORA"
    assert settings["task_type"] == "CAUSAL_LM"
    assert settings["base_model_name_or_path"] == str(directory)
    assert sorted(settings["target_modules"]) == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(directory)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    tokens = torch.arange(14)
    with torch.no_grad():
        logits = loaded(input_ids=tokens[None]).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    assert torch.allclose(logprobs(model), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "nemotron"])
def test_families(tmp_path: Path, alone: Ranks, kind: str) -> None:
    model = adapted(save_model(tmp_path / "m", kind=kind, tied=False), alone)
    names = {name for name, _ in model.named_weights()}
    assert not any("lm_head" in name or "embed" in name for name in names)
    assert any("down_proj" in name for name in names)


def test_only_the_named_targets(directory: Path, alone: Ranks) -> None:
    model = adapted(directory, alone, lora=LoraConfig(rank=2, targets=["q_proj", "v_proj"]))
    assert len(list(model.named_weights())) == 2 * 2 * 2
    with pytest.raises(LoraError, match=r"'c_attn' is no linear layer .* down_proj, gate_proj"):
        adapted(directory, alone, lora=LoraConfig(rank=2, targets=["c_attn"]))


def test_a_full_disk_is_one_for_the_adapter_too(
    directory: Path, alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who publishes waits for space only where it is told so by number."""
    import safetensors.torch

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    adapter = gather_adapter(adapted(directory, alone), ranks=alone)
    assert adapter is not None
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        adapter.write(tmp_path / "adapter", base=directory)
    assert full_disk(caught.value) is not None


def test_without_peft_the_remedy_is_named(
    directory: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(LoraError, match=r"install prorl-hpc\[lora\]"):
        adapted(directory, alone)


def test_a_bfloat16_base_and_float32_adapters(directory: Path, alone: Ranks) -> None:
    model = adapted(directory, alone, dtype="bfloat16")
    assert {p.dtype for _, _, p in model.named_stored()} == {torch.bfloat16}
    assert {p.dtype for _, p in model.named_weights()} == {torch.float32}
    stepper = stepper_of(model, alone)
    assert run(stepper, batch())["kl"] == 0.0
    assert run(stepper, batch(), step=1)["kl"] > 0


# ---- Whole runs against a fake buffer ----


def lora_recipe(*, placement: ReferencePlacement = ReferencePlacement.device) -> Recipe:
    recipe = tiny_recipe()
    recipe.steps = 6
    recipe.algorithm.reset.every_steps = 3
    recipe.learner.checkpoint_every_steps = 2
    recipe.learner.export_every_steps = 6
    recipe.learner.reference_placement = placement
    recipe.model.lora = LoraConfig(rank=4, alpha=8.0)
    return recipe


def go(run: Run, *, stop_after: int | None = None) -> str:
    fake = FakeClient(vocabulary=VOCABULARY)
    left = iter(range(stop_after or 10_000))
    return session.train(
        run,
        connect=lambda patience_seconds: fake,
        read=fake.read,
        stop_reason=lambda: None if next(left, None) is not None else "stopped by the test",
    )


def test_interrupted_equals_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", lora_recipe())
    assert go(whole) == "done"
    parts = make_run(tmp_path / "parts", lora_recipe(placement=ReferencePlacement.cpu))
    for calls in (4, 7):
        assert go(parts, stop_after=calls) == "stopped by the test"
    assert go(parts) == "done"
    files = [read_manifest(run.policy(6)).files for run in (whole, parts)]
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert files[0][name] == files[1][name]
    ends = [read_state(run.checkpoint(6)) for run in (whole, parts)]
    assert ends[0].reference == ends[1].reference
    rows = read_metrics(whole.metrics("learner"))
    kl = {row["step"]: row["kl"] for row in rows if row["event"] == "step"}
    assert kl[1] == kl[4] == 0.0
    assert kl[3] > 0
    assert (whole.root / "export" / "step-00000006" / "adapter" / "adapter_config.json").is_file()
    # Adapters, their moments and the reference's alone: a checkpoint doesn't hold the base.
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    held = FileSystemReader(whole.checkpoint(6) / "tensors").read_metadata().state_dict_metadata
    assert held
    assert all("lora_" in name for name in held)


@pytest.mark.process
@pytest.mark.timeout(1200)
def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    alone = make_run(tmp_path / "one", lora_recipe())
    assert go(alone) == "done"
    mixed = make_run(tmp_path / "mixed", lora_recipe(placement=ReferencePlacement.cpu))
    assert train_with(mixed, 2, stop_after=7) != "done"
    assert go(mixed) == "done"
    found, expected = (open_weights(run.policy(6)) for run in (mixed, alone))
    assert found.names() == expected.names()
    for name in expected.names():
        assert torch.allclose(found.get(name), expected.get(name), atol=2e-3), name
