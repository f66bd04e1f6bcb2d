"""MFU, tokens/s and peak memory of a learner step on one GPU: 1.5B and 7B shapes, 8k and 16k.

Models are built from their shapes with random weights: nothing is fetched. All weights of the 1.5B
shape are trained; 7B doesn't fit on one device with AdamW in float32 (the estimate says so), so
that its adapters are, on a frozen bfloat16 base, and the first layers of it with all weights.
Beside each stand the estimate of `prorl_hpc.learner.memory` and the physical limit: the device's
dense bfloat16 rate (989 TFLOP/s of an H200).

MFU counts what a step must compute: 6 FLOPs per weight and token (4 with a frozen base) and causal
attention, nothing for what activation checkpointing computes again; the reference's pass counts 2.

python benchmarks/learner_h200.py            under 8 minutes on one H200
python benchmarks/learner_h200.py --smoke    tiny shapes, on CPU: only that it runs
"""

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BUDGET_SECONDS = 460.0
"""No new case is begun when less than the last one took is left of this."""

H200_FLOPS = 989e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row of the table."""

    name: str
    shape: dict[str, Any]
    context: int
    lora: int = 0
    num_samples: int = 4


QWEN_1_5B = {
    "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
QWEN_7B = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip

CASES = (
    Case(name="1.5B", shape=QWEN_1_5B, context=8192),
    Case(name="1.5B", shape=QWEN_1_5B, context=16384),
    Case(name="7B adapters", shape=QWEN_7B, context=8192, lora=32),
    Case(name="7B adapters", shape=QWEN_7B, context=16384, lora=32),
    Case(name="7B, 14 of 28 layers", shape=QWEN_7B | {"num_hidden_layers": 14}, context=8192),
)
SMOKE = (
    Case(name="tiny", shape=TINY, context=128),
    Case(name="tiny adapters", shape=TINY, context=256, lora=4),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--peak-flops", type=float, default=H200_FLOPS)
    options = parser.parse_args()
    import torch

    if not options.smoke and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --smoke runs tiny shapes on CPU")
    started = time.monotonic()
    print(
        f"{'shape':20} {'context':>8} {'tokens/s':>9} {'MFU':>6} {'peak GiB':>9} {'estimate':>9}",
        flush=True,
    )
    last = 0.0
    for case in SMOKE if options.smoke else CASES:
        begun = time.monotonic()
        if begun - started + last > BUDGET_SECONDS:
            print(f"{case.name:20} {case.context:8} left out: out of time")
            continue
        print(_row(case, options, torch.device("cpu" if options.smoke else "cuda")), flush=True)
        last = time.monotonic() - begun


def _row(case: Case, options: argparse.Namespace, device: Any) -> str:
    import torch

    from prorl_hpc.learner.memory import GIB, estimate, facts_of

    on_gpu = device.type == "cuda"
    recipe = _recipe(case, on_gpu=on_gpu)
    facts = facts_of(case.shape)
    stepper = _stepper(case, recipe, device)
    samples = _samples(case)
    rewards = [sample.reward for sample in samples]
    stepper.run(samples, rewards, step=0)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for number in range(1, options.repeats + 1):
        stepper.run(samples, rewards, step=number)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / options.repeats
    peak = f"{torch.cuda.max_memory_allocated() / GIB:9.1f}" if on_gpu else f"{'-':>9}"
    tokens = sum(sample.length for sample in samples)
    mfu = f"{_flops(case, facts) * len(samples) / seconds / options.peak_flops:6.1%}"
    need = estimate(recipe, facts).total / GIB
    del stepper
    if on_gpu:
        torch.cuda.empty_cache()
    return (
        f"{case.name:20} {case.context:8} {tokens / seconds:9.0f} {mfu if on_gpu else '     -'} "
        f"{peak} {need:9.1f}"
    )


def _flops(case: Case, facts: Any) -> float:
    """Of one sample of the whole context: forward, backward, and the reference's forward pass."""
    layers = facts.num_layers * facts.layer_parameters
    head = facts.vocab_size * facts.hidden_size * 3 / 4  # prompts, a quarter, need no logits
    dense = 2 * (layers + head) * case.context
    # Scores and their product with the values, over half of the square.
    attention = 2 * facts.num_layers * facts.num_heads * facts.head_dim * case.context**2
    backward = (1 if case.lora else 2) * dense + 2 * attention
    return float(dense + attention + backward + dense + attention)


def _recipe(case: Case, *, on_gpu: bool) -> Any:
    from prorl_hpc.recipe import LoraConfig, Recipe, TaskConfig

    recipe = Recipe(name="benchmark", steps=1, tasks={"t": TaskConfig(kind="logic")})
    recipe.model.dtype = "bfloat16"
    recipe.model.activation_checkpointing = True
    recipe.model.context_tokens = case.context
    recipe.model.lora = LoraConfig(rank=case.lora)
    recipe.learner.tokens_per_micro_batch = case.context
    recipe.learner.head_chunk_tokens = 2048
    recipe.learner.gpus_per_node = int(on_gpu)
    return recipe


def _stepper(case: Case, recipe: Any, device: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from prorl_hpc.learner.distributed import Ranks
    from prorl_hpc.learner.model import build_policy
    from prorl_hpc.learner.objective import objective_config
    from prorl_hpc.learner.optimizer import build_optimizer
    from prorl_hpc.learner.step import Stepper

    ranks = Ranks(rank=0, world=1, device=device)
    with tempfile.TemporaryDirectory() as place:
        config = AutoConfig.for_model("qwen2", max_position_embeddings=case.context, **case.shape)
        with torch.device(device):
            network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        network.save_pretrained(place)
        del network
        model = build_policy(
            Path(place), recipe.model, ranks=ranks, chunk_tokens=recipe.learner.head_chunk_tokens
        )
    stepper = Stepper(
        model=model,
        optimizer=build_optimizer([p for _, p in model.named_weights()], config=recipe.algorithm),
        algorithm=recipe.algorithm,
        objective=objective_config(recipe.algorithm, max_new_tokens=case.context),
        ranks=ranks,
        tokens_per_micro_batch=case.context,
    )
    stepper.renew_reference(index=0, step=0)
    return stepper


def _samples(case: Case) -> list[Any]:
    """Samples of the whole context, a quarter of it prompt."""
    from prorl_hpc.learner.batches import Sample

    rng = np.random.default_rng(0)
    sampled = np.arange(case.context // 4, case.context)
    return [
        Sample(
            group_id=index // 2,
            task="t",
            tokens=rng.integers(0, case.shape["vocab_size"], case.context).astype(np.int32),
            sampled=sampled,
            sampler_logprobs=np.full(len(sampled), -12.0, dtype=np.float32),
            reward=float(index % 2),
            stopped=True,
            oldest_version=0,
            temperature=1.0,
        )
        for index in range(case.num_samples)
    ]


if __name__ == "__main__":
    main()
