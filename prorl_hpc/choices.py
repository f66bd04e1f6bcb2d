"""The words a recipe may choose from.

Names and values are equal: Hydra matches names, files hold values.
"""

from enum import StrEnum


class Estimator(StrEnum):
    """Advantage estimators (prorl_hpc.learner.advantage)."""

    grpo = "grpo"
    dr_grpo = "dr_grpo"
    rloo = "rloo"
    reinforce_pp_baseline = "reinforce_pp_baseline"
    maxrl = "maxrl"

    @property
    def needs_groups(self) -> bool:
        """Whether a group of one rollout has no signal."""
        return True


class Surrogate(StrEnum):
    """Policy-gradient surrogates (prorl_hpc.learner.surrogate)."""

    ppo = "ppo"
    gspo = "gspo"
    cispo = "cispo"


class Aggregation(StrEnum):
    """How token losses become one number (prorl_hpc.learner.aggregate)."""

    token_mean = "token_mean"  # noqa: S105
    sequence_mean = "sequence_mean"
    constant = "constant"


class KlEstimator(StrEnum):
    """Estimators of KL(policy, reference)."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KlPlace(StrEnum):
    """Where the KL term goes."""

    loss = "loss"
    reward = "reward"


class Correction(StrEnum):
    """Correction for a sampler that is not the learner's own policy."""

    none = "none"
    truncated = "truncated"
    icepop = "icepop"
    sequence_mask = "sequence_mask"
    decoupled = "decoupled"


class StalePolicy(StrEnum):
    """What happens to groups older than max_staleness."""

    drop = "drop"
    correct = "correct"


class OnExhausted(StrEnum):
    """What a step does when its draws are used up before its batch is full."""

    accept_partial = "accept_partial"
    error = "error"


class CurriculumKind(StrEnum):
    """How the instances of training groups are chosen (prorl_hpc.buffer.opening)."""

    none = "none"
    solve_rate = "solve_rate"
    bandit = "bandit"


class Attention(StrEnum):
    """Attention over packed documents (prorl_hpc.learner.attention)."""

    auto = "auto"
    documents = "documents"
    sdpa = "sdpa"
    flex_attention = "flex_attention"
    flash_attention_2 = "flash_attention_2"


class ReferencePlacement(StrEnum):
    """Where the reference's weights live."""

    device = "device"
    cpu = "cpu"


class EngineKind(StrEnum):
    """Inference engines."""

    transformers = "transformers"
    vllm = "vllm"
    sglang = "sglang"
    openai = "openai"


class InferencePlacement(StrEnum):
    """Where inference engines run."""

    rollout_nodes = "rollout_nodes"
    """In each rollout job, which then needs the GPUs."""
    own_jobs = "own_jobs"
    """In an array of jobs of their own, which all rollout nodes share."""


class EnvironmentKind(StrEnum):
    """How an instance's sandbox is made."""

    none = "none"
    apptainer = "apptainer"
    bubblewrap = "bubblewrap"
    process = "process"


class AgentKind(StrEnum):
    """Agents (prorl_hpc.agents)."""

    single_turn = "single_turn"
    tools = "tools"
    bash = "bash"
    harness = "harness"
