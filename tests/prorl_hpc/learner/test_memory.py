"""The memory estimate: hand-computed parts, measured activations, advice that fits."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from prorl_hpc.choices import ReferencePlacement
from prorl_hpc.learner.attention import document_layout
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.memory import (
    GIB,
    ModelFacts,
    check_memory,
    estimate,
    facts_for,
    facts_of,
    layer_bytes_per_token,
)
from prorl_hpc.learner.model import build_policy
from prorl_hpc.recipe import LoraConfig, ModelConfig, Recipe, RecipeError, TaskConfig

from .live_bytes import LiveBytes
from .step_peak import measure, ranks_of

QWEN_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def recipe(*, nodes: int = 1, ranks: int = 8, context: int = 4096, half: bool = True) -> Recipe:
    made = Recipe(name="m", steps=1, tasks={"t": TaskConfig(kind="logic")})
    made.learner.nodes, made.learner.ranks_per_node = nodes, ranks
    made.learner.gpus_per_node = ranks
    made.learner.tokens_per_micro_batch = context
    made.model.context_tokens = context
    made.model.dtype = "bfloat16" if half else "float32"
    made.model.activation_checkpointing = True
    return made


def test_parameters_of_a_known_model() -> None:
    # Qwen2.5-7B: 7,615,616,512 parameters by its own count (biases on q, k, v only).
    assert facts_of(QWEN_7B).num_parameters == pytest.approx(7_615_616_512, rel=1e-4)


def test_sharded_state_is_counted_by_hand() -> None:
    facts = facts_of(QWEN_7B)
    need = estimate(recipe(), facts)
    shard = -(-facts.num_parameters // 8)
    assert need.weights == need.gradients == need.reference == 4 * shard
    assert need.optimizer == 8 * shard
    no_reference = recipe()
    no_reference.algorithm.kl_coef = 0.0
    assert estimate(no_reference, facts).reference == 0


def measured_layer_bytes(directory: Path, *, half: bool, tokens: int = 256) -> float:
    """Bytes per token that one more layer saves for the backward pass."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    sizes = []
    for layers in (1, 3):
        config = AutoConfig.for_model(
            "qwen2", vocab_size=32, hidden_size=128, intermediate_size=384,
            num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
            tie_word_embeddings=True,
        )  # fmt: skip
        place = directory / f"{half}-{layers}"
        AutoModelForCausalLM.from_config(config).save_pretrained(place)
        ranks = Ranks(rank=0, world=1, device=torch.device("cpu"))
        settings = ModelConfig(dtype="bfloat16" if half else "float32")
        model = build_policy(place, settings, ranks=ranks, chunk_tokens=64)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved: dict[int, torch.Tensor] = {}

        def keep(
            tensor: torch.Tensor,
            weights: set[int] = weights,
            saved: dict[int, torch.Tensor] = saved,
        ) -> torch.Tensor:
            place = tensor.untyped_storage().data_ptr()
            # Cast weights under autocast are counted with the weights.
            if place not in weights and tensor.shape[0] != 128 and tensor.shape[-1] != 128 * 128:
                saved[place] = tensor
            return tensor

        position = torch.arange(1, tokens)
        ids = torch.randint(32, (tokens,))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(
                ids, document_layout([tokens]), position - 1, ids[position], torch.ones(tokens - 1)
            )
        sizes.append(sum(t.untyped_storage().nbytes() for t in saved.values()))
    return (sizes[1] - sizes[0]) / 2 / tokens


@pytest.mark.parametrize("half", [False, True])
def test_activations_are_within_15_percent_of_what_is_saved(tmp_path: Path, half: bool) -> None:
    facts = ModelFacts(
        hidden_size=128, intermediate_size=384, num_layers=1, num_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=32, tied=True,
    )  # fmt: skip
    measured = measured_layer_bytes(tmp_path, half=half)
    expected = layer_bytes_per_token(facts, half=half, low_residual=False)
    assert expected == pytest.approx(measured, rel=0.15)


MEASURED: list[dict[str, object]] = [
    {},
    {"reference": False},
    {"half": True, "vocabulary": 8192},
    {"half": True, "checkpointing": True},
    {"lora": 8, "checkpoint_copy": True},
    {"ranks": 4, "checkpoint_copy": True},
    {"ranks": 4, "half": True, "checkpointing": True},
    {"ranks": 4, "half": True, "lora": 8, "placement": "cpu"},
]


@pytest.mark.parametrize("settings", MEASURED, ids=lambda s: "-".join(s) or "plain")
def test_the_whole_is_within_15_percent_of_a_measured_peak(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    """All tensors of a real step on CPU (ranks that aren't there for several); no device's own."""
    made = measured_recipe(tmp_path / "model", **settings)  # type: ignore[arg-type]
    facts = facts_for(made)
    assert facts is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peak = measure(made, tmp_path / "model")
    assert estimate(made, facts).total == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize("lora", [0, 8])
def test_no_rank_ever_holds_the_whole_model(tmp_path: Path, lora: int) -> None:
    """Eight ranks of a node that each built a whole model of 32 billion would need 1 TiB."""
    made = measured_recipe(tmp_path / "model", ranks=4, lora=lora)
    facts = facts_for(made)
    assert facts is not None
    with ranks_of(4) as ranks, LiveBytes() as meter, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build_policy(tmp_path / "model", made.model, ranks=ranks, chunk_tokens=64)
    assert all(not tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    shard = facts.num_parameters // 4 * 4
    whole_at_once = max(facts.layer_parameters, facts.outer_parameters) * 4
    assert meter.peak < 1.1 * (shard + 2 * whole_at_once)
    assert meter.peak < 0.8 * facts.num_parameters * 4


def measured_recipe(
    directory: Path,
    *,
    half: bool = False,
    checkpointing: bool = False,
    checkpoint_copy: bool = False,
    reference: bool = True,
    placement: str = "device",
    lora: int = 0,
    ranks: int = 1,
    vocabulary: int = 1024,
) -> Recipe:
    """A model of four layers on disk, and a recipe that trains it at 512 tokens of context."""
    if lora:
        pytest.importorskip("peft")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen2", vocab_size=vocabulary, hidden_size=128, intermediate_size=384,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    made = recipe(ranks=ranks, context=512, half=half)
    made.learner.gpus_per_node = 0
    made.model.path = str(directory)
    made.model.activation_checkpointing = checkpointing
    made.model.lora = LoraConfig(rank=lora)
    made.algorithm.kl_coef = 1e-3 if reference else 0.0
    made.learner.tokens_per_micro_batch = 1024
    made.learner.head_chunk_tokens = 256
    made.learner.deterministic = not checkpoint_copy
    made.learner.reference_placement = ReferencePlacement(placement)
    return made


def test_a_reference_in_main_memory_takes_nothing_of_a_gpu() -> None:
    facts = facts_of(QWEN_7B)
    made = recipe()
    made.learner.reference_placement = ReferencePlacement.cpu
    assert estimate(made, facts).reference == 0
    made.learner.gpus_per_node = 0
    assert estimate(made, facts).reference == 4 * -(-facts.num_parameters // 8)


def test_adapters_are_counted_by_hand() -> None:
    facts = facts_of(QWEN_7B)
    # 28 heads and 4 key/value heads of 128: q, o 3584 + 3584; k, v 3584 + 512; mlp 3584 + 18944.
    layer = 16 * (2 * 7168 + 2 * 4096 + 3 * 22528)
    assert facts.layer_adapters(16, ()) == layer
    assert facts.layer_adapters(16, ("q_proj", "v_proj")) == 16 * (7168 + 4096)
    made = recipe()
    made.model.lora = LoraConfig(rank=16)
    need = estimate(made, facts)
    shard = -(-28 * layer // 8) * 4
    assert need.gradients == need.reference == shard
    assert need.optimizer == 2 * shard
    assert need.weights == shard + 2 * -(-facts.num_parameters // 8)


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    facts = facts_of(QWEN_7B)
    assert check_memory(recipe(), facts, available_bytes=80 * GIB).total < 80 * GIB
    with pytest.raises(RecipeError, match=r"needs about .* GiB .* use \d+ ranks"):
        check_memory(recipe(ranks=1), facts, available_bytes=80 * GIB)
    wide = recipe(context=16384, half=False)
    wide.model.activation_checkpointing = False
    with pytest.raises(RecipeError, match=r"set model.activation_checkpointing=true"):
        check_memory(wide, facts, available_bytes=80 * GIB)
    with pytest.raises(RecipeError, match="smaller model or larger devices"):
        check_memory(recipe(), facts, available_bytes=GIB)


def test_advice_fits() -> None:
    facts = facts_of(QWEN_7B)
    with pytest.raises(RecipeError) as caught:
        check_memory(recipe(ranks=1), facts, available_bytes=80 * GIB)
    ranks = int(str(caught.value).split("use ")[1].split(" ")[0])
    advised = recipe(ranks=ranks)
    if "learner.reference_placement=cpu" in str(caught.value):
        advised.learner.reference_placement = ReferencePlacement.cpu
    assert estimate(advised, facts).total <= 80 * GIB


def test_facts_come_from_the_recipe_or_the_model_directory(tmp_path: Path) -> None:
    made = recipe()
    made.model.path = "some/hub-name"
    assert facts_for(made) is None
    made.model.path = str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    assert facts_for(made) == facts_of(QWEN_7B)
    made.model.path, made.model.vocabulary = None, "abc"
    made.model.config = {k: v for k, v in QWEN_7B.items() if k != "vocab_size"}
    found = facts_for(made)
    assert found is not None
    assert found.vocab_size == 8
    made.model.config = {}
    with pytest.raises(RecipeError, match="num_attention_heads"):
        facts_for(made)


def test_the_planner_needs_no_torch() -> None:
    code = "import sys, prorl_hpc.learner.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
