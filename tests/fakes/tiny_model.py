"""A random model of two layers on disk, with a character tokenizer, as a published policy."""

from pathlib import Path
from typing import Any

from prorl_hpc.agents.characters import build_character_tokenizer
from prorl_hpc.policy import publish_policy
from prorl_hpc.run import Run

CHARACTERS = (
    "0123456789+-*/=<>() \n?.,:;'\"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ[]{}_"
)


def tiny_model(*, seed: int = 0, tied: bool = True, scale: float = 0.5) -> Any:
    """A Qwen2 of hidden size 64; `scale` spreads the logits so that tokens aren't all alike."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=5 + len(dict.fromkeys(CHARACTERS)),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=scale,
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config).eval()


def write_model(directory: Path, *, seed: int = 0, tied: bool = True) -> None:
    """Model and tokenizer in Hugging Face form."""
    tiny_model(seed=seed, tied=tied).save_pretrained(directory)
    build_character_tokenizer(CHARACTERS).save_pretrained(directory)


def publish_tiny(run: Run, *, version: int, seed: int | None = None, tied: bool = True) -> Path:
    """Publishes a random policy; its weights follow from the version unless `seed` is given."""
    chosen = version if seed is None else seed
    publish_policy(
        run,
        version=version,
        step=version,
        write=lambda directory: write_model(directory, seed=chosen, tied=tied),
    )
    return run.policy(version)
