"""Reading shards beside numpy.memmap over the same bytes.

    python benchmarks/shard_read.py --directory /path/on/the/file/system/to/measure

Sequential: every trajectory in order; random: every trajectory in a shuffled order. The files are
in the page cache for both. The first line of the shard rows includes the check of the digest.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from prorl_hpc.buffer.image import shard_image, write_shard
from prorl_hpc.buffer.shard import FLAT_ARRAYS, OpenShard
from prorl_hpc.records import Kind, Trajectory


def trajectory(rollout: int, *, num_tokens: int) -> Trajectory:
    return Trajectory(
        group_id=rollout // 16,
        rollout_index=rollout % 16,
        kind=Kind.train,
        task="bench",
        instance_id=str(rollout // 16),
        tokens=np.full(num_tokens, rollout, dtype=np.int32),
        loss_mask=np.ones(num_tokens, dtype=np.uint8),
        logprobs=np.zeros(num_tokens, dtype=np.float32),
        versions=np.zeros(num_tokens, dtype=np.int32),
        reward=1.0,
    )


def seconds_of(body: Callable[[], object]) -> float:
    started = time.perf_counter()
    body()
    return time.perf_counter() - started


def read_maps(maps: dict[str, np.ndarray], order: np.ndarray, *, num_tokens: int) -> int:
    """Copies each trajectory's arrays out of the memory maps."""
    total = 0
    for row in order:
        part = slice(row * num_tokens, (row + 1) * num_tokens)
        total += sum(np.array(values[part]).shape[0] for values in maps.values())
    return total


def measure(directory: Path, *, count: int, num_tokens: int) -> None:
    made = [trajectory(i, num_tokens=num_tokens) for i in range(count)]
    path = directory / "shard.h5"
    digest = write_shard(path, image=shard_image(made))
    maps: dict[str, np.ndarray] = {}
    for name, dtype in FLAT_ARRAYS:
        flat = np.concatenate([getattr(t, name) for t in made])
        flat.tofile(directory / name)
        maps[name] = np.memmap(directory / name, dtype=dtype, mode="r")
    size = sum(t.num_bytes for t in made) / 1e6
    orders = {
        "sequential": np.arange(count),
        "random": np.random.default_rng(0).permutation(count),
    }
    opening = seconds_of(lambda: OpenShard(path, number=1, digest=digest).close())
    shard = OpenShard(path, number=1, digest=digest)
    print(f"{count} trajectories of {num_tokens} tokens, {size:.0f} MB, one shard")
    print(f"{'opening with digest':<28}{size / opening:>10.0f} MB/s")
    for name, order in orders.items():
        mapped = seconds_of(lambda o=order: read_maps(maps, o, num_tokens=num_tokens))
        read = seconds_of(lambda o=order: [shard.read(int(row)) for row in o])
        print(
            f"{name:<12}{'shard':<16}{size / read:>10.0f} MB/s {count / read:>10.0f}/s"
            f"   memmap {size / mapped:>8.0f} MB/s"
        )
    shard.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8000)
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="shard-read-", dir=given.directory))
    try:
        measure(place, count=given.trajectories, num_tokens=given.tokens)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
