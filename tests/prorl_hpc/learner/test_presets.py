"""The numbers of the shipped algorithms are those of their papers, written down here once more."""

from pathlib import Path

import pytest

from prorl_hpc.compose import compose
from prorl_hpc.learner.objective_config import objective_config
from prorl_hpc.recipe import AlgorithmConfig

PAPERS = {
    # arXiv 2505.24864: clip 0.2/0.4, n = 16, T 1.2, 256 prompts in mini-batches of 64, lr 2e-6.
    "prorl_v1": {
        "estimator": "grpo", "surrogate": "ppo", "aggregation": "token_mean",
        "clip_low": 0.2, "clip_high": 0.4, "kl_coef": 1e-4, "filter_degenerate": True,
        "num_rollouts": 16, "batch_groups": 256, "updates_per_step": 256 // 64,
        "learning_rate": 2e-6, "temperature": 1.2, "reset.reset_optimizer": True,
    },
    # REINFORCE++-baseline, clip 0.20/0.28, k2; clamps, IcePop and batches of NeMo RL's recipe.
    "prorl_v2": {
        "estimator": "reinforce_pp_baseline", "surrogate": "ppo", "aggregation": "token_mean",
        "clip_low": 0.2, "clip_high": 0.28, "kl_coef": 1e-4, "kl_estimator": "k2",
        "kl_input_clamp": 20.0, "kl_output_clamp": 10.0, "kl_place": "loss",
        "correction": "icepop", "correction_low": 0.5, "correction_high": 5.0,
        "filter_degenerate": True, "max_refills": 10 - 1, "batch_groups": 32,
        "num_rollouts": 16, "reset.reset_optimizer": False,
        "shaping.cosine_on_steps": 100, "shaping.cosine_off_steps": 500,
    },
    # arXiv 2503.14476: equations 10 to 13; 512 prompts in 16 updates; a fifth of 20480 tokens.
    "dapo": {
        "estimator": "grpo", "surrogate": "ppo", "aggregation": "token_mean",
        "clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.0, "filter_degenerate": True,
        "batch_groups": 512, "updates_per_step": 16, "num_rollouts": 16, "learning_rate": 1e-6,
        "shaping.overlong_buffer_tokens": 20480 // 5, "shaping.overlong_penalty": 1.0,
    },
    # arXiv 2402.03300, section 4.2: 1024 samples a batch, 64 of each question.
    "grpo": {
        "estimator": "grpo", "surrogate": "ppo", "aggregation": "sequence_mean",
        "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.04, "kl_estimator": "k3",
        "num_rollouts": 64, "batch_groups": 1024 // 64, "learning_rate": 1e-6,
    },
    # arXiv 2507.18071, section 5.1.
    "gspo": {
        "estimator": "grpo", "surrogate": "gspo", "aggregation": "sequence_mean",
        "clip_low": 3e-4, "clip_high": 4e-4, "kl_coef": 0.0, "updates_per_step": 4,
    },
    # arXiv 2503.20783: no deviation, a constant divisor.
    "dr_grpo": {
        "estimator": "dr_grpo", "surrogate": "ppo", "aggregation": "constant",
        "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "num_rollouts": 8,
    },
    # arXiv 2506.13585: weight of the log probability, no bound below to speak of.
    "cispo": {
        "estimator": "grpo", "surrogate": "cispo", "aggregation": "token_mean",
        "clip_low": 0.99, "kl_coef": 0.0,
    },
}  # fmt: skip


def value(algorithm: AlgorithmConfig, key: str) -> object:
    found: object = algorithm
    for name in key.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_numbers(name: str, tmp_path: Path) -> None:
    algorithm = compose(["recipe=prorl", f"algorithm={name}", f"run_root={tmp_path}"]).algorithm
    assert {key: value(algorithm, key) for key in PAPERS[name]} == PAPERS[name]
    objective_config(algorithm, max_new_tokens=1024)


def test_the_resets_of_prorl() -> None:
    """v1 on stalled or degraded validation; v2 also every 200 to 500 steps and on a KL spike."""
    first, second = (
        compose(["recipe=prorl", f"algorithm={name}"]).algorithm.reset
        for name in ("prorl_v1", "prorl_v2")
    )
    assert first.stall_validations
    assert first.degradation
    assert second.stall_validations
    assert second.kl_spike
    assert 200 <= (second.every_steps or 0) <= 500
