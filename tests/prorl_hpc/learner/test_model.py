"""Packed documents against one at a time through transformers itself; loading and refusing."""

import json
import warnings
from pathlib import Path

import pytest
import torch

from prorl_hpc.choices import Attention
from prorl_hpc.learner.attention import AttentionError, document_attention, document_layout
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.model import ModelError, PolicyModel, build_policy, gather_weights
from prorl_hpc.learner.weights import WeightsError, open_weights, save_weights
from prorl_hpc.recipe import ModelConfig

from .conftest import VOCABULARY, save_model

LENGTHS = [5, 1, 17, 9, 2, 30]


def packed_logprobs(
    model: PolicyModel, documents: list[torch.Tensor], *, temperature: float
) -> torch.Tensor:
    tokens = torch.cat(documents)
    layout = document_layout([len(d) for d in documents])
    position, start = [], 0
    for document in documents:
        position += range(start + 1, start + len(document))
        start += len(document)
    chosen = torch.tensor(position)
    heat = torch.full((len(chosen),), temperature)
    logprobs, _ = model(tokens, layout, chosen - 1, tokens[chosen], heat)
    return logprobs


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "nemotron"])
@pytest.mark.parametrize("implementation", ["auto", "documents", "sdpa"])
def test_packed_equals_one_by_one(
    tmp_path: Path, alone: Ranks, kind: str, tied: bool, implementation: str
) -> None:
    directory = save_model(tmp_path / "model", kind=kind, tied=tied)
    model = build_policy(
        directory, ModelConfig(attention=Attention(implementation)), ranks=alone, chunk_tokens=7
    )
    found = packed_logprobs(model, documents(), temperature=0.7)
    assert torch.allclose(found, one_by_one(directory), atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "nemotron"])
def test_flex_attention_masks_documents(tmp_path: Path, alone: Ranks, kind: str) -> None:
    """Uncompiled and forward alone: on CPU it has no backward pass, so that it's refused there."""
    directory = save_model(tmp_path / "model", kind=kind)
    model = build_policy(directory, ModelConfig(), ranks=alone, chunk_tokens=7)
    model.network.set_attn_implementation("flex_attention")
    stance = torch.compiler.set_stance("force_eager")
    with torch.no_grad(), stance, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that uncompiled it is slow
        found = packed_logprobs(model, documents(), temperature=0.7)
    assert torch.allclose(found, one_by_one(directory), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "remedy"), [("flex_attention", "set auto or documents"), ("flash_attention_2", "GPU")]
)
def test_attention_that_cannot_train_here_is_refused(
    tmp_path: Path, alone: Ranks, name: str, remedy: str
) -> None:
    config = ModelConfig(attention=Attention(name))
    with pytest.raises(AttentionError, match=f"model.attention={name} .*{remedy}"):
        build_policy(save_model(tmp_path / "m"), config, ranks=alone, chunk_tokens=7)


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (n,), generator=generator) for n in LENGTHS]


def one_by_one(directory: Path) -> torch.Tensor:
    """The same log-probabilities through transformers itself, a document at a time."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(directory)
    return torch.cat(
        [
            (plain(d[None]).logits[0, :-1] / 0.7).log_softmax(-1).gather(-1, d[1:, None])[:, 0]
            for d in documents()
        ]
    ).detach()


def test_gradients_of_checkpointed_layers_are_the_same(tmp_path: Path, alone: Ranks) -> None:
    directory = save_model(tmp_path / "model")
    gradients = []
    for checkpointing in (False, True):
        config = ModelConfig(activation_checkpointing=checkpointing)
        model = build_policy(directory, config, ranks=alone, chunk_tokens=64)
        packed_logprobs(model, [torch.arange(9), torch.arange(4)], temperature=1.0).sum().backward()
        gradients.append([p.grad for _, p in model.named_weights()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_bfloat16_computes_low_and_keeps_float32_weights(tmp_path: Path, alone: Ranks) -> None:
    directory = save_model(tmp_path / "model")
    low = build_policy(directory, ModelConfig(dtype="bfloat16"), ranks=alone, chunk_tokens=64)
    high = build_policy(directory, ModelConfig(), ranks=alone, chunk_tokens=64)
    documents = [torch.arange(12)]
    found = packed_logprobs(low, documents, temperature=1.0)
    expected = packed_logprobs(high, documents, temperature=1.0)
    assert found.dtype == torch.float32
    assert 0 < float((found - expected).abs().max().detach()) < 0.1
    assert all(p.dtype == torch.float32 for p in low.parameters())


def test_wrong_settings_are_one_line(tmp_path: Path, alone: Ranks) -> None:
    directory = save_model(tmp_path / "model")
    with pytest.raises(ModelError, match=r"model.dtype='float8'"):
        build_policy(directory, ModelConfig(dtype="float8"), ranks=alone, chunk_tokens=8)
    with pytest.raises(ModelError, match=r"no usable config.json"):
        build_policy(tmp_path / "nothing", ModelConfig(), ranks=alone, chunk_tokens=8)


def test_missing_and_misshapen_weights_are_named(tmp_path: Path, alone: Ranks) -> None:
    directory = save_model(tmp_path / "model")
    model = build_policy(directory, ModelConfig(), ranks=alone, chunk_tokens=8)
    weights = gather_weights(model, dtype=torch.float32, ranks=alone)
    name = "model.norm.weight"
    save_weights({k: v for k, v in weights.items() if k != name}, directory)
    with pytest.raises(ModelError, match=r"lacks 'model.norm.weight'"):
        build_policy(directory, ModelConfig(), ranks=alone, chunk_tokens=8)
    save_weights(weights | {name: torch.zeros(3)}, directory)
    with pytest.raises(ModelError, match=r"shape \(3,\)"):
        build_policy(directory, ModelConfig(), ranks=alone, chunk_tokens=8)
    (directory / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(WeightsError, match="no readable safetensors"):
        build_policy(directory, ModelConfig(), ranks=alone, chunk_tokens=8)


def test_weights_split_over_files(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.full((4,), float(i)) for i in range(5)}
    save_weights(weights, tmp_path, file_bytes=32)  # two tensors of 16 bytes per file
    assert len(list(tmp_path.glob("model-*-of-00003.safetensors"))) == 3
    stored = open_weights(tmp_path)
    assert stored.names() == sorted(weights)
    assert all(torch.equal(stored.get(name), weights[name]) for name in weights)


def test_attention_refuses_what_it_would_get_wrong() -> None:
    query = torch.zeros(1, 1, 4, 2)
    with pytest.raises(ValueError, match=r"own position_ids.*model.attention=sdpa"):
        document_attention(torch.nn.Module(), query, query, query, None)
    with pytest.raises(ValueError, match="sliding_window=3"):
        document_attention(
            torch.nn.Module(), query, query, query, None,
            position_ids=document_layout([4]).position_ids, sliding_window=3,
        )  # fmt: skip
    with pytest.raises(ValueError, match="lengths"):
        document_layout([3, 0])


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_the_embedding_of_an_end_of_turn_that_pads_learns(
    tmp_path: Path, alone: Ranks, kind: str
) -> None:
    """transformers never trains the padding token's row; with pad == eos that is a real token."""
    directory = save_model(tmp_path / "model", kind=kind, tied=False)
    config = directory / "config.json"
    ends = {"pad_token_id": 3, "eos_token_id": 3}
    config.write_text(json.dumps(json.loads(config.read_text()) | ends))
    model = build_policy(directory, ModelConfig(), ranks=alone, chunk_tokens=7)
    packed_logprobs(model, [torch.tensor([4, 3, 5, 6])], temperature=1.0).sum().backward()
    gradient = model.network.get_input_embeddings().weight.grad
    assert gradient[3].abs().sum() > 0
