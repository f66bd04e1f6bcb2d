"""How much memory a rank of the learner needs, before anything is queued. Pure; imports no torch.

Model, gradients and AdamW's moments are float32 and sharded over all ranks, so is the reference.
Activations were counted on the models themselves (tensors saved for the backward pass): a layer
keeps 12 hidden and 4 intermediate values per token, its input alone with activation checkpointing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prorl_hpc.recipe import Recipe, RecipeError

GIB = 1 << 30
CONTEXT_BYTES = GIB
"""What a CUDA context, NCCL's buffers and fragmentation take, roughly."""

FLOAT = 4
HALF = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What the estimate needs to know of a model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tied: bool

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer (norms and biases, a few thousandths, included)."""
        query = self.num_heads * self.head_dim
        key_value = 2 * self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * query + key_value) + query + key_value
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def outer_parameters(self) -> int:
        """Embedding, head and last norm."""
        tables = 1 if self.tied else 2
        return tables * self.vocab_size * self.hidden_size + self.hidden_size

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.layer_parameters + self.outer_parameters


def facts_of(config: Mapping[str, Any], *, vocab_size: int | None = None) -> ModelFacts:
    """Facts from the fields of a `config.json`; raises RecipeError naming what is missing."""
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return ModelFacts(
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab_size=int(vocab_size or config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError) as err:
        raise RecipeError(f"model config lacks {err} or has a wrong value there") from err


def facts_for(recipe: Recipe) -> ModelFacts | None:
    """Facts of the recipe's model; None for a hub name, whose config isn't here."""
    model = recipe.model
    if model.path is None:
        return facts_of(model.config, vocab_size=len(set(model.vocabulary or "")) + 5)
    path = Path(model.path) / "config.json"
    if not path.is_file():
        return None
    try:
        return facts_of(json.loads(path.read_text()))
    except ValueError as err:
        raise RecipeError(f"model.path={model.path!r}: config.json can't be read: {err}") from err


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes per rank, by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    gathered: int
    """Whole layers (and head) while they compute, in the compute type."""
    activations: int
    head: int
    """One chunk of logits and its gradient, and the head's gradient."""
    overhead: int

    @property
    def total(self) -> int:
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.reference
            + self.gathered
            + self.activations
            + self.head
            + self.overhead
        )

    def lines(self) -> list[str]:
        """A small table for people."""
        names = (
            "weights", "gradients", "optimizer", "reference",
            "gathered", "activations", "head", "overhead", "total",
        )  # fmt: skip
        return [f"{name:12} {getattr(self, name) / GIB:8.2f} GiB" for name in names]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """The settings that the estimate depends on, and that advice may change."""

    ranks: int
    context_tokens: int
    micro_batch_tokens: int
    checkpointing: bool
    half: bool
    has_reference: bool
    chunk_tokens: int
    on_gpu: bool
    deterministic: bool


def estimate(recipe: Recipe, facts: ModelFacts) -> MemoryEstimate:
    """What one rank needs at the recipe's longest context."""
    return _estimate(_setting(recipe), facts)


def check_memory(recipe: Recipe, facts: ModelFacts, *, available_bytes: int) -> MemoryEstimate:
    """The estimate; raises RecipeError with the nearest setting that fits where it doesn't.

    `available_bytes`: memory of one rank's device (or its share of the node, on CPU).
    """
    setting = _setting(recipe)
    need = _estimate(setting, facts)
    if need.total <= available_bytes:
        return need
    raise RecipeError(
        f"a learner rank needs about {need.total / GIB:.1f} GiB ({facts.num_parameters / 1e9:.2f} "
        f"billion parameters, {setting.ranks} ranks, {setting.micro_batch_tokens} tokens), there "
        f"are {available_bytes / GIB:.1f} GiB; {_advice(setting, facts, available_bytes)}"
    )


def _setting(recipe: Recipe) -> _Setting:
    contexts = [stage.context_tokens or 0 for stage in recipe.algorithm.stages]
    context = max([recipe.model.context_tokens, *contexts])
    return _Setting(
        ranks=recipe.learner.nodes * recipe.learner.ranks_per_node,
        context_tokens=context,
        micro_batch_tokens=max(recipe.learner.tokens_per_micro_batch, context),
        checkpointing=recipe.model.activation_checkpointing,
        half=recipe.model.dtype == "bfloat16",
        has_reference=recipe.algorithm.kl_coef > 0,
        chunk_tokens=recipe.learner.head_chunk_tokens,
        on_gpu=recipe.learner.gpus_per_node > 0,
        deterministic=recipe.learner.deterministic,
    )


def _estimate(setting: _Setting, facts: ModelFacts) -> MemoryEstimate:
    shard = -(-facts.num_parameters // setting.ranks)
    compute = HALF if setting.half else FLOAT
    gathered = 0
    if setting.ranks > 1:
        # The layer at work, the next one on its way, their whole gradients; embedding and head.
        gathered = 3 * facts.layer_parameters * compute + 2 * facts.outer_parameters * compute
    elif setting.half:
        gathered = facts.num_parameters * HALF  # autocast keeps the cast weights of a pass
    chunk = min(setting.chunk_tokens, setting.micro_batch_tokens)
    return MemoryEstimate(
        weights=shard * FLOAT,
        gradients=shard * FLOAT,
        optimizer=2 * shard * FLOAT,
        reference=shard * FLOAT if setting.has_reference else 0,
        gathered=gathered,
        activations=_activations(setting, facts),
        head=3 * chunk * facts.vocab_size * FLOAT + facts.vocab_size * facts.hidden_size * FLOAT,
        overhead=CONTEXT_BYTES if setting.on_gpu else _copies(setting, shard),
    )


def _copies(setting: _Setting, shard: int) -> int:
    """On CPU a checkpoint on its way to the disk is a second copy of what it holds."""
    if setting.deterministic:
        return 0
    return (4 if setting.has_reference else 3) * shard * FLOAT


def _activations(setting: _Setting, facts: ModelFacts) -> int:
    tokens = setting.micro_batch_tokens
    residual = HALF if setting.half and setting.ranks > 1 else FLOAT
    outer = 4 * facts.hidden_size * FLOAT
    layer = layer_bytes_per_token(facts, half=setting.half, sharded=setting.ranks > 1)
    if setting.checkpointing:
        kept = facts.num_layers * facts.hidden_size * residual + 2 * layer
    else:
        kept = facts.num_layers * layer
    return tokens * (outer + kept)


def layer_bytes_per_token(facts: ModelFacts, *, half: bool, sharded: bool) -> int:
    """What one layer keeps for its backward pass, per token.

    float32: 12 hidden + 4 intermediate values. bfloat16: intermediates halve; norms still keep
    float32 copies, and under autocast (one rank) the residual stream stays float32 as well.
    """
    if not half:
        return FLOAT * (12 * facts.hidden_size + 4 * facts.intermediate_size)
    hidden_bytes = 30 if sharded else 40
    return hidden_bytes * facts.hidden_size + HALF * 4 * facts.intermediate_size


def _advice(setting: _Setting, facts: ModelFacts, available: int) -> str:
    """The nearest change that fits, in words: cheap settings first, then ranks, then context."""

    def fits(changed: _Setting) -> bool:
        return _estimate(changed, facts).total <= available

    words: list[str] = []
    current = setting
    for text, changed in _cheaper(setting):
        words.append(text)
        current = changed
        if fits(current):
            return "set " + " ".join(words)
    for factor in (2, 4, 8, 16, 32, 64, 128):
        ranks = setting.ranks * factor
        if fits(replace(current, ranks=ranks)):
            return f"use {ranks} ranks (learner.nodes x learner.ranks_per_node) " + _and(words)
    tokens = current.context_tokens // 2
    while tokens >= 256:
        if fits(replace(current, context_tokens=tokens, micro_batch_tokens=tokens)):
            return f"set model.context_tokens={tokens} " + _and(words)
        tokens //= 2
    return "choose a smaller model or larger devices"


def _and(words: list[str]) -> str:
    return "and " + " ".join(words) if words else ""


def _cheaper(setting: _Setting) -> list[tuple[str, _Setting]]:
    """Settings that save memory at little cost, each on top of those before it."""
    steps: list[tuple[str, _Setting]] = []
    if not setting.checkpointing:
        setting = replace(setting, checkpointing=True)
        steps.append(("model.activation_checkpointing=true", setting))
    if setting.micro_batch_tokens > setting.context_tokens:
        setting = replace(setting, micro_batch_tokens=setting.context_tokens)
        steps.append((f"learner.tokens_per_micro_batch={setting.context_tokens}", setting))
    if not setting.half:
        setting = replace(setting, half=True)
        steps.append(("model.dtype=bfloat16", setting))
    if setting.chunk_tokens > 512:
        setting = replace(setting, chunk_tokens=512)
        steps.append(("learner.head_chunk_tokens=512", setting))
    return steps
