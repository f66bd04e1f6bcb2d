"""Tokens per second of a learner step on 1 and on 2 ranks (gloo, CPU), against the ideal of twice.

Both run the same samples, in the same call, one thread per rank; 2 ranks shard with FSDP2 and share
the samples. On a machine with fewer free cores than ranks the ideal can't be reached: the table
says how many cores there are, and what two independent single ranks reach side by side.

python benchmarks/learner_scaling.py [--hidden 256] [--layers 4] [--samples 64]
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096, help="per micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        print(json.dumps(_measure(options)))
        return
    from learner_step import _save_model

    with tempfile.TemporaryDirectory() as place:
        _save_model(options, place)
        one = _run(place, [1])
        beside = _run(place, [1, 1])
        two = _run(place, [2])
    print(f"{os.cpu_count()} cores")
    print(f"{'ranks':32} {'tokens/s':>10} {'of ideal':>9}")
    print(f"{'1':32} {one:10.0f} {1:9.2f}")
    print(f"{'2, independent, side by side':32} {beside:10.0f} {beside / one / 2:9.2f}")
    print(f"{'2, one model':32} {two:10.0f} {two / one / 2:9.2f}")
    print(f"2 ranks against what the machine gives two processes: {two / beside:.2f}")


def _run(model: str, worlds: list[int]) -> float:
    """Tokens per second of learners of so many ranks each, all at once, together."""
    root = str(Path(__file__).resolve().parent.parent)
    learners = []
    for world in worlds:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        for rank in range(world):
            environment = os.environ | {
                "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "RANK": str(rank),
                "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            command = [sys.executable, __file__, *sys.argv[1:], "--model", model]
            learners.append(
                (
                    rank,
                    subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True),
                )
            )
    total = 0.0
    for rank, process in learners:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"rank {rank} ended with {process.returncode}")
        total += float(json.loads(output.strip().splitlines()[-1])) if rank == 0 else 0.0
    return total


def _measure(options: argparse.Namespace) -> float:
    import torch
    from learner_step import _samples

    from prorl_hpc.learner.distributed import join, leave
    from prorl_hpc.learner.model import build_policy
    from prorl_hpc.learner.objective import objective_config
    from prorl_hpc.learner.optimizer import build_optimizer
    from prorl_hpc.learner.step import Stepper
    from prorl_hpc.recipe import AlgorithmConfig, ModelConfig

    torch.set_num_threads(1)
    algorithm = AlgorithmConfig()
    ranks = join(timeout_seconds=600)
    try:
        model = build_policy(Path(options.model), ModelConfig(), ranks=ranks, chunk_tokens=512)
        stepper = Stepper(
            model=model,
            optimizer=build_optimizer(model.parameters(), config=algorithm),
            algorithm=algorithm,
            objective=objective_config(algorithm, max_new_tokens=options.longest),
            ranks=ranks,
            tokens_per_micro_batch=options.tokens,
        )
        stepper.renew_reference(index=0, step=0)
        samples: list[Any] = _samples(options)
        rewards = [sample.reward for sample in samples]
        stepper.run(samples, rewards, step=0)
        ranks.barrier()
        started = time.perf_counter()
        for number in range(1, options.repeats + 1):
            stepper.run(samples, rewards, step=number)
        ranks.barrier()
        seconds = (time.perf_counter() - started) / options.repeats
    finally:
        leave(ranks)
    return sum(sample.length for sample in samples) / seconds


if __name__ == "__main__":
    main()
