"""Packing efficiency on response-length distributions, against what other trainers do.

    python benchmarks/packing.py [--sequences 4096] [--ranks 8] [--budget 16384]

Prints one table per distribution. Token efficiency: real tokens over the tokens that are run
(budget of the used micro-batches when packed, padded rectangle when padded). Work efficiency:
total work over what all ranks pay while each round waits for its slowest. Peers: padding to the
longest of a fixed-size batch, and packing in order of arrival. The limit is 1.
"""

import argparse
import math
import random
import time

from prorl_hpc.learner.packing import pack, sequence_work

CONTEXT = 8192


def distributions(num: int) -> dict[str, list[int]]:
    """Lengths in tokens of prompt + response, seeded."""
    rng = random.Random(0)

    def cut(value: float) -> int:
        return min(CONTEXT, max(64, int(value)))

    return {
        "reasoning (log-normal, median 1.3k)": [
            cut(rng.lognormvariate(7.2, 0.9)) for _ in range(num)
        ],
        "half at the limit": [
            CONTEXT if rng.random() < 0.5 else cut(rng.lognormvariate(7.0, 0.8)) for _ in range(num)
        ],
        "short answers (exponential, mean 300)": [
            cut(rng.expovariate(1 / 300)) for _ in range(num)
        ],
        "agents (uniform 512 to 8k)": [cut(rng.uniform(512, CONTEXT)) for _ in range(num)],
    }


def arrival(lengths: list[int], *, budget: int, ranks: int, hidden: int) -> tuple[float, float]:
    """Fill a micro-batch until the next sequence doesn't fit; deal them out in order."""
    bins: list[list[int]] = [[]]
    for length in lengths:
        if sum(bins[-1]) + length > budget:
            bins.append([])
        bins[-1].append(length)
    return sum(lengths) / (budget * len(bins)), waiting(bins, ranks=ranks, hidden=hidden)


def padded(lengths: list[int], *, budget: int, ranks: int, hidden: int) -> tuple[float, float]:
    """Fixed number of sequences per micro-batch, each padded to the longest of its batch."""
    size = max(1, budget // max(lengths))
    bins = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    run = [[max(chosen)] * len(chosen) for chosen in bins]
    useful = sum(sequence_work(x, hidden_size=hidden) for x in lengths)
    spent = sum(sequence_work(x, hidden_size=hidden) for chosen in run for x in chosen)
    balance = waiting(run, ranks=ranks, hidden=hidden)
    return sum(lengths) / sum(map(sum, run)), balance * useful / spent


def waiting(bins: list[list[int]], *, ranks: int, hidden: int) -> float:
    """Work over the work paid when ranks take the bins in turn, each round together."""
    loads = [sum(sequence_work(x, hidden_size=hidden) for x in chosen) for chosen in bins]
    loads += [0.0] * (math.ceil(len(loads) / ranks) * ranks - len(loads))
    paid = sum(ranks * max(loads[i : i + ranks]) for i in range(0, len(loads), ranks))
    return sum(loads) / paid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--budget", type=int, default=16384, help="tokens per micro-batch")
    parser.add_argument("--hidden", type=int, default=1536)
    options = parser.parse_args()
    shape = {"budget": options.budget, "ranks": options.ranks, "hidden": options.hidden}
    print(f"Packing {options.sequences} sequences: {shape}; limit 1.00")
    print(f"{'distribution':<40}{'method':<10}{'tokens':>8}{'work':>8}{'ms':>8}")
    for name, lengths in distributions(options.sequences).items():
        started = time.perf_counter()
        plan = pack(
            lengths,
            token_budget=options.budget,
            num_ranks=options.ranks,
            hidden_size=options.hidden,
        )
        milliseconds = 1000 * (time.perf_counter() - started)
        rows = {
            "padded": padded(lengths, **shape),
            "arrival": arrival(lengths, **shape),
            "ours": (plan.token_efficiency, plan.work_efficiency),
        }
        for method, (tokens, work) in rows.items():
            cost = f"{milliseconds:>8.0f}" if method == "ours" else ""
            print(f"{name:<40}{method:<10}{tokens:>8.3f}{work:>8.3f}{cost}")


if __name__ == "__main__":
    main()
