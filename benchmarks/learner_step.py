"""Real tokens per second and peak memory of a learner step, beside a plain padded step.

The plain step is what a simple trainer does: sequences padded to the longest of a micro-batch,
transformers' own forward pass, full logits. Same model, data, loss and optimizer; each runs in a
process of its own, so that its peak memory is its own. Not a comparison with a named trainer.

python benchmarks/learner_step.py [--hidden 64] [--layers 2] [--vocabulary 4096] [--samples 32]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096, help="per micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("ours", "padded"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(_measure(options)))
        return
    rows = {}
    for name in ("ours", "padded"):
        command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows[name] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{'step':8} {'tokens/s':>10} {'peak MiB over start':>20}")
    for name, row in rows.items():
        print(f"{name:8} {row['tokens_per_second']:10.0f} {row['peak_mib']:20.0f}")
    speed = rows["ours"]["tokens_per_second"] / rows["padded"]["tokens_per_second"]
    memory = rows["ours"]["peak_mib"] / rows["padded"]["peak_mib"]
    print(f"ours / padded: {speed:.2f}x tokens/s, {memory:.2f}x memory")


def _samples(options: argparse.Namespace) -> list[Any]:
    """Log-normal response lengths after prompts of a quarter of the longest, as rollouts have."""
    from prorl_hpc.learner.batches import Sample

    rng = np.random.default_rng(0)
    made = []
    for index in range(options.samples):
        prompt = options.longest // 4
        room = options.longest - prompt
        length = prompt + int(np.clip(rng.lognormal(np.log(room / 4), 0.8), 4, room))
        sampled = np.arange(prompt, length)
        made.append(
            Sample(
                group_id=index // 8,
                task="t",
                tokens=rng.integers(0, options.vocabulary, length).astype(np.int32),
                sampled=sampled,
                sampler_logprobs=np.full(len(sampled), -5.0, dtype=np.float32),
                reward=float(rng.random()),
                stopped=True,
                oldest_version=0,
                temperature=1.0,
            )
        )
    return made


def _measure(options: argparse.Namespace) -> dict[str, float]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from prorl_hpc.learner.distributed import Ranks
    from prorl_hpc.learner.model import build_policy
    from prorl_hpc.learner.objective import objective_config
    from prorl_hpc.learner.optimizer import build_optimizer
    from prorl_hpc.learner.step import Stepper
    from prorl_hpc.recipe import AlgorithmConfig, ModelConfig

    torch.set_num_threads(1)
    samples = _samples(options)
    tokens = sum(sample.length for sample in samples)
    algorithm = AlgorithmConfig(kl_coef=0.0)
    with tempfile.TemporaryDirectory() as place:
        config = AutoConfig.for_model(
            "qwen2", vocab_size=options.vocabulary, hidden_size=options.hidden,
            intermediate_size=3 * options.hidden, num_hidden_layers=options.layers,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(place)
        ranks = Ranks(rank=0, world=1, device=torch.device("cpu"))
        model = build_policy(Path(place), ModelConfig(), ranks=ranks, chunk_tokens=512)
    stepper = Stepper(
        model=model,
        optimizer=build_optimizer(model.parameters(), config=algorithm),
        algorithm=algorithm,
        objective=objective_config(algorithm, max_new_tokens=options.longest),
        ranks=ranks,
        tokens_per_micro_batch=options.tokens,
    )
    if options.only == "padded":
        model.network.set_attn_implementation("sdpa")

    def step(number: int) -> None:
        if options.only == "ours":
            stepper.run(samples, [s.reward for s in samples], step=number)
        else:
            _padded_step(stepper, samples, tokens=options.tokens)

    before = _peak_mib()
    step(0)
    started = time.perf_counter()
    for number in range(1, options.repeats + 1):
        step(number)
    seconds = (time.perf_counter() - started) / options.repeats
    return {"tokens_per_second": tokens / seconds, "peak_mib": _peak_mib() - before}


def _padded_step(stepper: Any, samples: list[Any], *, tokens: int) -> None:
    import torch

    from prorl_hpc.learner.advantage import compute_advantages

    rewards = torch.tensor([s.reward for s in samples])
    groups = torch.tensor([s.group_id for s in samples])
    advantages = compute_advantages(rewards, groups, estimator="grpo")
    total = sum(s.response_tokens for s in samples)
    rows = max(1, tokens // max(s.length for s in samples))
    stepper.optimizer.zero_grad()
    for start in range(0, len(samples), rows):
        part = samples[start : start + rows]
        longest = max(s.length for s in part)
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        mask = torch.zeros(len(part), longest, dtype=torch.long)
        sampled = torch.zeros(len(part), longest)
        for row, sample in enumerate(part):
            ids[row, : sample.length] = torch.from_numpy(sample.tokens.astype(np.int64))
            mask[row, : sample.length] = 1
            sampled[row, torch.from_numpy(sample.sampled)] = 1
        logits = stepper.model.network(input_ids=ids, attention_mask=mask).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -(ratio * advantages[start : start + rows, None] * sampled[:, 1:]).sum() / total
        loss.backward()
    torch.nn.utils.clip_grad_norm_(stepper.model.parameters(), 1.0)
    stepper.optimizer.step()


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
