"""From a published version to its first token, beside the bare reload of the same vLLM server.

Ours is what a rollout node does when it hears of a version: check manifest, hashes and headers,
then move the server. The bare reload is the server's update alone, nothing checked. The limit is
reading the version's bytes once. Streams run all the while, so that there is always a next token.

    python benchmarks/weight_update.py --python /opt/vllm/bin/python [--hidden 512] [--layers 8]
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from prorl_hpc.inference.engine import Sampling
from prorl_hpc.inference.vllm_engine import VllmEngine, VllmOptions
from prorl_hpc.policy import digest_at, publish_policy, verify_policy
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.run import Run

VOCABULARY = 4096
CONTEXT_TOKENS = 4096
NUM_STREAMS = 4
UPDATE_SECONDS = 300.0
"""No token of a version for so long: the benchmark gives up."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=os.environ.get("PRORL_VLLM_PYTHON", ""))
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--start-seconds", type=float, default=600.0)
    parser.add_argument("--logs", type=Path, default=None, help="keep the server's log here")
    options = parser.parse_args()
    if not Path(options.python).is_file():
        print(
            f"no vLLM: --python {options.python!r} (or PRORL_VLLM_PYTHON) must name the "
            "interpreter of an environment that holds it; see docs/inference.md",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(measure(Run(Path(place)), options))
    return 0


async def measure(run: Run, options: argparse.Namespace) -> None:
    """Publishes two versions per repeat, one for each way, and prints the table."""
    publish(run, 0, options)
    engine = VllmEngine(
        VllmOptions(
            num_servers=1,
            python=options.python,
            context_tokens=CONTEXT_TOKENS,
            dtype="float32" if options.gpus == 0 else "bfloat16",
            max_batch=2 * NUM_STREAMS,
            num_gpus=options.gpus,
            start_seconds=options.start_seconds,
            log_directory=options.logs,
        ),
        path=run.policy(0).resolve(),
        version=0,
    )
    try:
        await engine.start()
        seen = Seen()
        streams = [asyncio.create_task(seen.watch(engine, seed)) for seed in range(NUM_STREAMS)]
        versions = Versions(engine, run=run, digest=digest_at(run.policy(0)))
        follow = asyncio.create_task(versions.follow())
        try:
            await print_table(run, engine, versions, seen, options)
        finally:
            for task in (follow, *streams):
                task.cancel()
            await asyncio.gather(follow, *streams, return_exceptions=True)
    finally:
        await engine.close()


async def print_table(
    run: Run, engine: VllmEngine, versions: Versions, seen: "Seen", options: argparse.Namespace
) -> None:
    ours, bare, checks, limits = [], [], [], []
    (server,) = engine.pool._servers.values()
    for version in range(1, 2 * options.repeats + 1):
        path = await asyncio.to_thread(publish, run, version, options)
        if version % 2:

            async def tell(version: int = version) -> None:
                versions.offer(version)

            ours.append(await until_first_token(seen, version, tell))
        else:

            async def reload(version: int = version, path: Path = path) -> None:
                await server.load(version, path=path.resolve())

            bare.append(await until_first_token(seen, version, reload))
        checks.append(timed(lambda path=path: verify_policy(path)))
        limits.append(timed(lambda path=path: [f.read_bytes() for f in path.iterdir()]))
    size = sum(f.stat().st_size for f in run.policy(1).iterdir())
    print(f"version of {size / 1e6:.0f} MB, {NUM_STREAMS} streams, median of {options.repeats}\n")
    print(f"{'':<44}{'seconds':>9}{'slowest':>9}")
    for name, values in (
        ("published -> first token, a rollout node", ours),
        ("bare reload -> first token", bare),
        ("of ours: manifest and hashes", checks),
        ("limit: the bytes read once (cached)", limits),
    ):
        print(f"{name:<44}{statistics.median(values):>9.3f}{max(values):>9.3f}")
    print(f"{'ours / bare':<44}{statistics.median(ours) / statistics.median(bare):>9.2f}")


class Seen:
    """When the first token of each version came."""

    def __init__(self) -> None:
        self._first: dict[int, asyncio.Future[float]] = {}

    def first(self, version: int) -> "asyncio.Future[float]":
        return self._first.setdefault(version, asyncio.get_running_loop().create_future())

    async def watch(self, engine: VllmEngine, seed: int) -> None:
        """Streams without end, one answer after another."""
        sampling = Sampling(temperature=1.0, max_new_tokens=CONTEXT_TOKENS - 64, seed=seed)
        while True:
            prompt = tuple(range(10 + seed, 26 + seed))
            async with aclosing(engine.stream(prompt, sampling=sampling)) as stream:
                async for chunk in stream:
                    for version in set(chunk.versions):
                        if not self.first(version).done():
                            self.first(version).set_result(time.perf_counter())


async def until_first_token(seen: Seen, version: int, move: Callable[[], Awaitable[None]]) -> float:
    started = time.perf_counter()
    await move()
    async with asyncio.timeout(UPDATE_SECONDS):
        return await seen.first(version) - started


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def publish(run: Run, version: int, options: argparse.Namespace) -> Path:
    """A random model as a version."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    heads = max(1, options.hidden // 64)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
    )
    torch.manual_seed(version)
    model: Any = Qwen2ForCausalLM(config)
    publish_policy(run, version=version, step=version, write=model.save_pretrained)
    return run.policy(version)


if __name__ == "__main__":
    sys.exit(main())
