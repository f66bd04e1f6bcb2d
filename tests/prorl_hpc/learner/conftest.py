"""A tiny model on disk, one rank, and a recipe small enough to train in a unit test."""

from pathlib import Path

import pytest
import torch

from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.recipe import (
    AlgorithmConfig,
    LearnerConfig,
    ModelConfig,
    Recipe,
    ResetConfig,
    TaskConfig,
    ValidationConfig,
    dump_recipe,
)
from prorl_hpc.run import Run

VOCABULARY = 15


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def alone() -> Ranks:
    return Ranks(rank=0, world=1, device=torch.device("cpu"))


def save_model(directory: Path, *, kind: str = "qwen2", tied: bool = True, seed: int = 0) -> Path:
    """A model of two layers with grouped key/value heads, as Hugging Face writes it."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def tiny_recipe(**algorithm: object) -> Recipe:
    """Twelve steps of eight groups of a one-letter game, with a reset every five steps."""
    settings: dict[str, object] = {
        "batch_groups": 8,
        "num_rollouts": 4,
        "learning_rate": 1e-2,
        "kl_coef": 1e-3,
        "max_staleness": 0,
        "reset": ResetConfig(every_steps=5, min_distance_steps=1),
    }
    return Recipe(
        name="tiny",
        steps=12,
        tasks={"letters": TaskConfig(kind="logic", validation_size=8)},
        model=ModelConfig(
            config={
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "tie_word_embeddings": True,
            },
            vocabulary="abcdefghij",
            context_tokens=64,
        ),
        algorithm=AlgorithmConfig(**(settings | algorithm)),  # type: ignore[arg-type]
        learner=LearnerConfig(
            deterministic=True,
            checkpoint_every_steps=4,
            tokens_per_micro_batch=64,
            batch_seconds=60.0,
        ),
        validation=ValidationConfig(every_steps=5),
    )


def make_run(root: Path, recipe: Recipe) -> Run:
    """A run directory that holds the recipe."""
    root.mkdir(parents=True)
    run = Run(root)
    run.recipe.write_text(dump_recipe(recipe))
    return run
