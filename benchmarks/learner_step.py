"""Real tokens per second and peak memory of a learner step: ours, TRL's GRPOTrainer, a plain one.

The same model (Qwen2 type, random weights), the same samples (fixed, so that nobody generates),
the same loss (GRPO, DAPO's token mean, clip 0.2/0.4, no KL), AdamW in float32, one thread. TRL gets
the samples through its own `rollout_func` and is timed from the end of one step to that of another.
Each trainer is run at several micro-batch sizes, each in a process of its own; the fastest counts.
The plain step pads to the longest of a micro-batch and computes full logits, without any trainer.

python benchmarks/learner_step.py [--hidden 64] [--layers 2] [--vocabulary 4096] [--samples 32]
    [--trl-python VENV/bin/python]    an interpreter with trl (1.16) beside what we need
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

GROUP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=32, help="a multiple of 8")
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", default="2048,4096", help="per micro-batch, ours and plain")
    parser.add_argument("--rows", default="4,8,16", help="per micro-batch, TRL's")
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--only", choices=("ours", "plain", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(MEASURES[options.only](options)))
        return
    best = {name: row for name in MEASURES if (row := _best(name, options)) is not None}
    print(f"{'step':8} {'micro-batch':>12} {'tokens/s':>10} {'peak MiB over start':>20}")
    for name, row in best.items():
        size = f"{row['size']:.0f} {'rows' if name == 'trl' else 'tokens'}"
        print(f"{name:8} {size:>12} {row['tokens_per_second']:10.0f} {row['peak_mib']:20.0f}")
    for name in best.keys() - {"ours"}:
        speed = best["ours"]["tokens_per_second"] / best[name]["tokens_per_second"]
        memory = best["ours"]["peak_mib"] / best[name]["peak_mib"]
        print(f"ours / {name}: {speed:.2f}x tokens/s, {memory:.2f}x memory")


def _best(name: str, options: argparse.Namespace) -> dict[str, float] | None:
    """The fastest of the sizes; None, and a line, where the trainer can't be run."""
    python = options.trl_python if name == "trl" else sys.executable
    sizes = options.rows if name == "trl" else options.tokens
    root = str(Path(__file__).resolve().parent.parent)
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    rows = []
    for size in map(int, sizes.split(",")):
        command = [python, __file__, *sys.argv[1:], "--only", name, "--size", str(size)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:]
            print(f"{name} at {size} left out: {reason}", file=sys.stderr)
            continue
        row = json.loads(done.stdout.strip().splitlines()[-1])
        print(f"{name} at {size}: {row}", file=sys.stderr)
        rows.append(row | {"size": size})
    return max(rows, key=lambda row: row["tokens_per_second"]) if rows else None


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
                group_id=index // GROUP,
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


def _save_model(options: argparse.Namespace, place: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen2", vocab_size=options.vocabulary, hidden_size=options.hidden,
        intermediate_size=3 * options.hidden, num_hidden_layers=options.layers,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(place)


def _stepper(options: argparse.Namespace) -> Any:
    import torch

    from prorl_hpc.learner.distributed import Ranks
    from prorl_hpc.learner.model import build_policy
    from prorl_hpc.learner.objective import objective_config
    from prorl_hpc.learner.optimizer import build_optimizer
    from prorl_hpc.learner.step import Stepper
    from prorl_hpc.recipe import AlgorithmConfig, ModelConfig

    torch.set_num_threads(1)
    algorithm = AlgorithmConfig(kl_coef=0.0)
    ranks = Ranks(rank=0, world=1, device=torch.device("cpu"))
    with tempfile.TemporaryDirectory() as place:
        _save_model(options, place)
        model = build_policy(Path(place), ModelConfig(), ranks=ranks, chunk_tokens=512)
    return Stepper(
        model=model,
        optimizer=build_optimizer(model.parameters(), config=algorithm),
        algorithm=algorithm,
        objective=objective_config(algorithm, max_new_tokens=options.longest),
        ranks=ranks,
        tokens_per_micro_batch=options.size,
    )


def _measure_ours(options: argparse.Namespace) -> dict[str, float]:
    stepper, samples = _stepper(options), _samples(options)
    rewards = [sample.reward for sample in samples]
    return _timed(
        lambda number: stepper.run(samples, rewards, step=number), samples, options=options
    )


def _measure_plain(options: argparse.Namespace) -> dict[str, float]:
    stepper, samples = _stepper(options), _samples(options)
    stepper.model.network.set_attn_implementation("sdpa")
    return _timed(
        lambda _: _plain_step(stepper, samples, tokens=options.size), samples, options=options
    )


def _timed(
    step: Callable[[int], object], samples: list[Any], *, options: argparse.Namespace
) -> dict[str, float]:
    before = _peak_mib()
    step(0)
    started = time.perf_counter()
    for number in range(1, options.repeats + 1):
        step(number)
    seconds = (time.perf_counter() - started) / options.repeats
    tokens = sum(sample.length for sample in samples)
    return {"tokens_per_second": tokens / seconds, "peak_mib": _peak_mib() - before}


def _plain_step(stepper: Any, samples: list[Any], *, tokens: int) -> None:
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


def _measure_trl(options: argparse.Namespace) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from prorl_hpc.agents.characters import build_character_tokenizer

    torch.set_num_threads(1)
    samples = _samples(options)
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())

    def rollout(prompts: list[Any], _trainer: object) -> dict[str, Any]:
        # The samples of the step, whatever was asked.
        chosen = samples[: len(prompts)]
        cut = options.longest // 4
        return {
            "prompt_ids": [s.tokens[:cut].tolist() for s in chosen],
            "completion_ids": [s.tokens[cut:].tolist() for s in chosen],
            "logprobs": [s.sampler_logprobs.tolist() for s in chosen],
        }

    def reward(completions: list[Any], **_: object) -> list[float]:
        return [s.reward for s in samples[: len(completions)]]

    with tempfile.TemporaryDirectory() as place:
        _save_model(options, place)
        config = GRPOConfig(
            output_dir=str(Path(place) / "out"),
            per_device_train_batch_size=options.size,
            gradient_accumulation_steps=max(1, options.samples // options.size),
            num_generations=GROUP,
            max_completion_length=options.longest,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.4,
            loss_type="dapo",
            learning_rate=2e-6,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            max_grad_norm=1.0,
            max_steps=options.repeats + 1,
            logging_steps=1000,
            report_to="none",
            save_strategy="no",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["a"] * options.samples}),
            processing_class=build_character_tokenizer("abc"),
            rollout_func=rollout,
            callbacks=[Clock()],
        )
        before = _peak_mib()
        trainer.train()
    seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
    tokens = sum(sample.length for sample in samples)
    return {"tokens_per_second": tokens / seconds, "peak_mib": _peak_mib() - before}


MEASURES = {"ours": _measure_ours, "trl": _measure_trl, "plain": _measure_plain}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
