"""How much memory a rank of the learner needs, before anything is queued. Pure; imports no torch.

Model, gradients and AdamW's moments are float32 and sharded over all ranks, so is the reference
unless it waits in main memory; with adapters only these count, on a frozen base in the compute
type. Activations were counted on the models themselves (tensors saved for the backward pass). The
whole is within 15 % of the peaks of steps of small models.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prorl_hpc.choices import ReferencePlacement
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

    def layer_adapters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Weights of one layer's adapters, rank * (in + out) each."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query = self.num_heads * self.head_dim
        key_value = self.num_key_value_heads * self.head_dim
        widths = {
            "q_proj": hidden + query,
            "k_proj": hidden + key_value,
            "v_proj": hidden + key_value,
            "o_proj": query + hidden,
            "gate_proj": hidden + inner,
            "up_proj": hidden + inner,
            "down_proj": inner + hidden,
        }
        return rank * sum(widths.get(name, 0) for name in targets or widths)


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
    """What a chunk of logits takes beyond a layer that runs again."""
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
    reference_on_device: bool
    rank: int
    """Of adapters; 0 when all weights are trained."""
    targets: tuple[str, ...]


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
        reference_on_device=recipe.learner.reference_placement == ReferencePlacement.device,
        rank=recipe.model.lora.rank,
        targets=tuple(recipe.model.lora.targets),
    )


def _estimate(setting: _Setting, facts: ModelFacts) -> MemoryEstimate:
    base, trained = _shards(setting, facts)
    held = setting.has_reference and (setting.reference_on_device or not setting.on_gpu)
    return MemoryEstimate(
        weights=base + trained,
        gradients=trained,
        optimizer=2 * trained,
        reference=trained if held else 0,
        gathered=_gathered(setting, facts),
        activations=_activations(setting, facts),
        head=max(0, _head(setting, facts) - _recomputed(setting, facts)),
        overhead=CONTEXT_BYTES if setting.on_gpu else _copies(setting, trained),
    )


def _shards(setting: _Setting, facts: ModelFacts) -> tuple[int, int]:
    """Bytes of this rank's frozen weights, in the compute type, and of its trained ones."""
    if not setting.rank:
        return 0, -(-facts.num_parameters // setting.ranks) * FLOAT
    adapters = facts.num_layers * facts.layer_adapters(setting.rank, setting.targets)
    width = HALF if setting.half else FLOAT
    return -(-facts.num_parameters // setting.ranks) * width, -(-adapters // setting.ranks) * FLOAT


def _gathered(setting: _Setting, facts: ModelFacts) -> int:
    """Whole layers on several ranks; with one, the copies that autocast keeps of a pass."""
    compute = HALF if setting.half else FLOAT
    adapters = facts.layer_adapters(setting.rank, setting.targets) if setting.rank else 0
    if setting.ranks > 1:
        # The layer at work and the next one on its way; embedding and head. And the gradients of
        # what is trained.
        layer = 2 * facts.layer_parameters + (
            3 * adapters if setting.rank else facts.layer_parameters
        )
        outer = facts.outer_parameters * (1 if setting.rank else 2)
        return (layer + outer) * compute
    if not setting.half:
        return 0
    return HALF * (facts.num_layers * adapters if setting.rank else facts.num_parameters)


def _head(setting: _Setting, facts: ModelFacts) -> int:
    """A chunk of logits with its probabilities, or with the gradient of a head that is trained."""
    chunk = min(setting.chunk_tokens, setting.micro_batch_tokens) * facts.vocab_size
    table = facts.vocab_size * facts.hidden_size
    cast = HALF * table if setting.half and not setting.rank else 0
    product = FLOAT * table + cast if not setting.rank else 0
    backward = chunk * (FLOAT + HALF if setting.half else FLOAT) + product
    return cast + max(2 * FLOAT * chunk, backward)


def _copies(setting: _Setting, trained: int) -> int:
    """On CPU a checkpoint on its way to the disk is a second copy of what it holds."""
    if setting.deterministic:
        return 0
    return (4 if setting.has_reference else 3) * trained


def _activations(setting: _Setting, facts: ModelFacts) -> int:
    tokens = setting.micro_batch_tokens
    outer = 4 * facts.hidden_size * FLOAT
    if setting.checkpointing:
        width = HALF if _low_residual(setting) else FLOAT
        kept = facts.num_layers * facts.hidden_size * width
        return tokens * (outer + kept) + _recomputed(setting, facts)
    return tokens * (outer + facts.num_layers * _layer(setting, facts))


def _recomputed(setting: _Setting, facts: ModelFacts) -> int:
    """With activation checkpointing: the layer that runs again, when the head is done."""
    return setting.micro_batch_tokens * _layer(setting, facts) if setting.checkpointing else 0


def _layer(setting: _Setting, facts: ModelFacts) -> int:
    return layer_bytes_per_token(
        facts, half=setting.half, low_residual=_low_residual(setting), rank=setting.rank
    )


def _low_residual(setting: _Setting) -> bool:
    """Whether the residual stream is bfloat16; autocast alone, on one rank, leaves it float32."""
    return setting.half and (setting.ranks > 1 or setting.rank > 0)


def layer_bytes_per_token(
    facts: ModelFacts, *, half: bool, low_residual: bool, rank: int = 0
) -> int:
    """What one layer keeps for its backward pass, per token.

    float32: 12 hidden + 4 intermediate values. bfloat16: intermediates halve; norms still keep
    float32 copies, and with a float32 residual stream more of them. With adapters the two norms
    are frozen and keep less, and seven products of the rank's width come in.
    """
    if not half:
        hidden = 10 if rank else 12
        return FLOAT * (hidden * facts.hidden_size + 4 * facts.intermediate_size + 7 * rank)
    hidden_bytes = 24 if rank else 30 if low_residual else 40
    return hidden_bytes * facts.hidden_size + HALF * (4 * facts.intermediate_size + 7 * rank)


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
    if setting.on_gpu and setting.has_reference and setting.reference_on_device:
        setting = replace(setting, reference_on_device=False)
        steps.append(("learner.reference_placement=cpu", setting))
    if setting.chunk_tokens > 512:
        setting = replace(setting, chunk_tokens=512)
        steps.append(("learner.head_chunk_tokens=512", setting))
    return steps
