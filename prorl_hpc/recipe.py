"""The typed recipe: what to train, and how. Plain data with cross-field checks; imports no Hydra.

`prorl_hpc.compose` fills it through Hydra at submit; jobs read the frozen `recipe.yaml` of their
run through `load_recipe`. Dataclasses here can't be frozen (Hydra writes them), are never changed
after loading, and their enums have equal names and values (Hydra matches names, files hold values).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from hpc.errors import UserError
from hpc.keys import unknown_key
from hpc.site import Site
from prorl_hpc.choices import (
    AgentKind,
    Aggregation,
    Attention,
    Correction,
    CurriculumKind,
    EngineKind,
    EnvironmentKind,
    Estimator,
    InferencePlacement,
    KlEstimator,
    KlPlace,
    OnExhausted,
    ReferencePlacement,
    StalePolicy,
    Surrogate,
)


class RecipeError(UserError, ValueError):
    """A recipe that can't work; the message names the key, the value and what to do."""


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters instead of all weights (prorl_hpc.learner.lora)."""

    rank: int = 0
    """0: all weights are trained."""
    alpha: float = 32.0
    """The adapter's product is scaled by alpha / rank."""
    targets: list[str] = field(default_factory=list)
    """Linear layers by their last name, e.g. `q_proj`; empty: all but the head."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The policy's model."""

    path: str | None = None
    """Directory (or hub name) of a transformers model; None: built from `config` at random."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of a Qwen2-type configuration for a model from scratch (tiny models, tests)."""
    vocabulary: str | None = None
    """Characters of a character-level tokenizer, for a model from scratch."""
    dtype: str = "float32"
    """Compute type: `float32` or `bfloat16`; master weights and reductions are float32."""
    context_tokens: int = 8192
    attention: Attention = Attention.auto
    """`auto`: flash-attn's kernel on GPUs that have it, else `documents`."""
    activation_checkpointing: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(kw_only=True, slots=True)
class WarmupConfig:
    """A short supervised stage before reinforcement learning (only rank 0's data, tiny models)."""

    steps: int = 0
    batch: int = 128
    learning_rate: float = 1e-3
    max_tokens: int = 256


@dataclass(kw_only=True, slots=True)
class ResetConfig:
    """When the reference policy (and the optimizer) is reset (prorl_hpc.learner.reset)."""

    every_steps: int | None = None
    stall_validations: int | None = None
    """Reset after so many validations in a row without a new best."""
    degradation: float | None = None
    """Reset when blended validation falls so far below its best."""
    kl_spike: float | None = None
    min_distance_steps: int = 10
    reset_optimizer: bool = True
    """True as in ProRL v1; False as in v2."""
    roll_back: bool = False


@dataclass(kw_only=True, slots=True)
class ShapingConfig:
    """Reward shaping, applied after filtering on the raw reward (prorl_hpc.learner.shaping)."""

    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 0.0
    truncation_penalty: float = 0.0
    """Stop-properly: subtracted from responses that did not end by themselves."""
    cosine_length_weight: float = 0.0
    cosine_on_steps: int = 100
    cosine_off_steps: int = 500
    cosine_min: float = -1.0
    cosine_max: float = 0.0


@dataclass(kw_only=True, slots=True)
class StageConfig:
    """From `from_step` on, these replace the recipe's values."""

    from_step: int
    context_tokens: int | None = None
    num_rollouts: int | None = None


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """The objective and its numbers."""

    estimator: Estimator = Estimator.grpo
    surrogate: Surrogate = Surrogate.ppo
    aggregation: Aggregation = Aggregation.token_mean
    clip_low: float = 0.2
    clip_high: float = 0.4
    """Upper ratio bound, minus one (DAPO, eq. 10)."""
    dual_clip: float | None = None
    kl_coef: float = 1e-4
    kl_estimator: KlEstimator = KlEstimator.k2
    kl_place: KlPlace = KlPlace.loss
    kl_input_clamp: float = 20.0
    kl_output_clamp: float = 10.0
    kl_importance_weighted: bool = False
    """Weigh the KL by policy over sampler: exact for samples of an older policy."""
    entropy_coef: float = 0.0
    correction: Correction = Correction.none
    correction_low: float = 0.5
    correction_high: float = 5.0
    batch_groups: int = 256
    """Groups of one step (before its split into updates)."""
    num_rollouts: int = 16
    updates_per_step: int = 1
    max_staleness: int = 1
    stale: StalePolicy = StalePolicy.drop
    filter_degenerate: bool = True
    """Dynamic sampling: drop groups whose raw rewards are all equal."""
    max_refills: int = 10
    """Batches that may be drawn, beside the first, to fill one step."""
    on_exhausted: OnExhausted = OnExhausted.accept_partial
    """Then: go on with what there is, or end with an error."""
    learning_rate: float = 2e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    warmup_steps: int = 0
    gradient_clip: float = 1.0
    temperature: float = 1.0
    reset: ResetConfig = field(default_factory=ResetConfig)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    stages: list[StageConfig] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class HarnessConfig:
    """A program that speaks an LLM API and works in the sandbox by itself (agent `harness`)."""

    command: list[str] = field(default_factory=list)
    """Its command line; `{problem}`, `{problem_file}` and `{url}` are replaced."""
    package: str | None = None
    """Directory of its packages (pip install --target), seen read-only in the sandbox."""
    variables: dict[str, str] = field(default_factory=dict)
    """Exported to it, beside those that name the API's address."""


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """One task of the mixture; its key in `tasks` is its name."""

    kind: str
    """Registered kind: `logic`, `math`, `code`, `swe`, `cli`, `tools`, ..."""
    weight: float = 1.0
    """Share of the training groups. 0: it is only validated, on all of its data."""
    data: str | None = None
    """Path of the user's data set (JSONL or Parquet), where the kind has one."""
    validation_data: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """What the kind itself knows, e.g. `family: chain_sum` of a logic task."""
    train_size: int | None = None
    validation_size: int = 64
    max_new_tokens: int | None = None
    temperature: float | None = None
    num_rollouts: int | None = None
    validation_weight: float = 1.0
    agent: AgentKind = AgentKind.single_turn
    harness: HarnessConfig = field(default_factory=HarnessConfig)
    environment: EnvironmentKind = EnvironmentKind.none
    max_turns: int = 1
    score_timeout_seconds: float = 30.0
    system_prompt: str | None = None


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """The inference engine, wherever `inference.placement` puts it."""

    kind: EngineKind = EngineKind.transformers
    max_batch: int = 32
    servers_per_node: int = 1
    tensor_parallel: int = 1
    python: str | None = None
    """Interpreter of the environment that holds vLLM or SGLang; None: this one."""
    image: str | None = None
    arguments: list[str] = field(default_factory=list)
    """Further arguments of the server's command line."""
    urls: list[str] = field(default_factory=list)
    """Addresses of servers that run already, with their `/v1` (kind openai)."""
    model: str | None = None
    """Name of the model at `urls`; None: the first that each of them lists."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key of `urls`, if they want one."""
    start_seconds: float = 600.0
    request_seconds: float = 1800.0


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """The rollout array."""

    nodes: int = 1
    cpus_per_node: int = 8
    gpus_per_node: int = 0
    memory_mib: int = 32768
    walltime_minutes: int = 240
    init_workers: int = 8
    run_workers: int = 64
    eval_workers: int = 8
    max_new_tokens: int = 2048
    episode_seconds: float = 1800.0
    environment_seconds: float = 300.0
    spool_bytes: int = 1 << 30
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(kw_only=True, slots=True)
class InferenceConfig:
    """Where the engines of `rollout.engine` run; the sizes are those of jobs of their own."""

    placement: InferencePlacement = InferencePlacement.rollout_nodes
    nodes: int = 1
    cpus_per_node: int = 8
    gpus_per_node: int = 0
    memory_mib: int = 32768
    walltime_minutes: int = 240


@dataclass(kw_only=True, slots=True)
class BufferConfig:
    """The buffer job."""

    colocate: str = "none"
    """`none`: a CPU job of its own; `learner`: a step beside the learner."""
    cpus: int = 4
    memory_mib: int = 16384
    walltime_minutes: int = 1440
    shard_bytes: int = 32 << 20
    seal_seconds: float = 0.2
    lease_seconds: float = 60.0
    group_deadline_seconds: float = 3600.0
    min_usable: int = 2
    max_infrastructure_retries: int = 3
    peer_seconds: float = 3600.0
    """Without a learner or any rollout node for so long, the run ends and says who was missing."""
    curriculum: CurriculumKind = CurriculumKind.none
    """Which instances come up: `none`, all alike; `solve_rate` passes over most that were always,
    or never, solved when they last came up; `bandit` learns which ones teach (extra `bandit`)."""


@dataclass(kw_only=True, slots=True)
class LearnerConfig:
    """The learner job."""

    nodes: int = 1
    ranks_per_node: int = 1
    cpus_per_node: int = 16
    gpus_per_node: int = 0
    memory_mib: int = 65536
    walltime_minutes: int = 240
    tokens_per_micro_batch: int = 16384
    checkpoint_every_steps: int = 10
    keep_checkpoints: int = 3
    publish_every_steps: int = 1
    keep_policies: int = 4
    deterministic: bool = False
    """Batches in group order and staleness 0: the same recipe gives the same weights."""
    head_chunk_tokens: int = 4096
    reference_placement: ReferencePlacement = ReferencePlacement.device
    """`cpu`: the reference's shards wait in main memory between two scorings."""
    batch_seconds: float = 7200.0
    """No batch for so long: the learner releases its GPUs and says what it waited for."""
    export_every_steps: int | None = None
    """Every so many steps, and at the last, the policy goes to `export/`, which nothing cleans."""


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    """In-loop validation."""

    every_steps: int = 10
    num_rollouts: int = 1
    temperature: float = 0.6
    top_p: float = 1.0
    at_start: bool = True


@dataclass(kw_only=True, slots=True)
class Recipe:
    """One run, whole."""

    name: str
    steps: int
    """Optimizer steps (batches of groups) of the whole run."""
    tasks: dict[str, TaskConfig]
    seed: int = 0
    run_root: str = "runs"
    model: ModelConfig = field(default_factory=ModelConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    site: dict[str, Any] = field(default_factory=dict)
    """The chosen site's profile; decode it with `site_of`."""


def site_of(recipe: Recipe) -> Site:
    """The recipe's site; raises RecipeError naming the key that is wrong."""
    wrong = unknown_key(recipe.site, Site, path="site")
    if wrong is not None:
        raise RecipeError(f"{wrong} Correct the site profile")
    try:
        return msgspec.convert(recipe.site, Site, strict=False)
    except msgspec.ValidationError as err:
        raise RecipeError(f"site: {err}; correct the site profile") from err


def load_recipe(path: Path) -> Recipe:
    """Reads a frozen `recipe.yaml`; raises RecipeError for a file that isn't one."""
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as err:
        reason = " ".join(str(err).split())
        raise RecipeError(f"recipe file {str(path)!r} can't be read: {reason}") from err
    wrong = unknown_key(data, Recipe)
    if wrong is not None:
        raise RecipeError(f"{path.name}: {wrong}")
    _modernise(data)
    try:
        recipe = msgspec.convert(data, Recipe, strict=False)
    except msgspec.ValidationError as err:
        raise RecipeError(f"{path.name}: {err}") from err
    if recipe.site:
        site_of(recipe)
    check(recipe)
    return recipe


def _modernise(data: object) -> None:
    """Frozen recipes of earlier versions only say whether there is a curriculum."""
    buffer = data.get("buffer") if isinstance(data, dict) else None
    if isinstance(buffer, dict) and isinstance(buffer.get("curriculum"), bool):
        buffer["curriculum"] = "solve_rate" if buffer["curriculum"] else "none"


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML text that `load_recipe` reads back equal."""
    text: str = yaml.safe_dump(msgspec.to_builtins(recipe), sort_keys=False)
    return text


def check(recipe: Recipe) -> Recipe:
    """Returns the recipe; raises RecipeError for values that can't work together."""
    from prorl_hpc.limits import check_numbers
    from prorl_hpc.relations import check_relations

    check_numbers(recipe)
    check_relations(recipe)
    return recipe
