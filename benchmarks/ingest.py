"""Durable ingest of the buffer beside its physical limit and an unacknowledged pipe.

    python benchmarks/ingest.py --directory /path/on/the/file/system/to/measure

All rates are in bytes of the trajectories' arrays (13 per token), whatever is sent or written for
them; what that is, is printed too. Token ids and log-probabilities are random, so that nothing but
the redundancy of masks and versions can be saved; with `--observed` a share of each trajectory is
observations between sampled turns. Rows, alternating in one run, the median of the rounds each:

- raw: write + fsync of those bytes in files of shard size;
- pipe: those bytes over PUSH/PULL without any acknowledgement, with and without CURVE;
- frames: the same with the frames that the buffer's nodes send;
- buffer: real server process, real node processes, counted when acked (written, fsynced, renamed,
  listed in the manifest).

CPU time per megabyte is that of all threads of a side; a busy machine changes it less than the
rate. The last lines say what the cores at hand allow at most.
"""

import argparse
import asyncio
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path

from ingest_limits import (
    BYTES_PER_TOKEN,
    NUM_ROLLOUTS,
    SHARD_BYTES,
    SPAWN,
    Shape,
    Spent,
    pipe,
    raw,
)

from hpc.allocation import cpu_count
from hpc.memory import keep_freed_memory
from prorl_hpc.buffer.client import LearnerClient, RolloutClient
from prorl_hpc.buffer.config import BufferConfig
from prorl_hpc.buffer.keys import load_client_keys, load_server_keys, make_keys
from prorl_hpc.buffer.messages import GroupIds
from prorl_hpc.buffer.mixture import TaskShare
from prorl_hpc.buffer.server import KEEP_BYTES, BufferServer, ServerConfig
from prorl_hpc.run import Run


def serve(
    root: Path,
    ports: "multiprocessing.Queue[int]",
    cpu: "multiprocessing.Queue[float] | None" = None,
) -> None:
    """The buffer's process; tells its port, and at the end the CPU seconds of its service."""
    keep_freed_memory(KEEP_BYTES)
    run = Run(root)
    config = BufferConfig(
        tasks={"bench": TaskShare(weight=1.0, train_size=1000)},
        num_rollouts=NUM_ROLLOUTS,
        batch_groups=1_000_000,
        max_staleness=0,
        seed=0,
        min_usable=1,
        group_deadline_seconds=3600.0,
        lease_seconds=600.0,
        max_infrastructure_retries=0,
        deterministic=False,
    )
    server = BufferServer(
        run,
        config=config,
        server=ServerConfig(shard_bytes=SHARD_BYTES, farewell_seconds=0.1),
        keys=load_server_keys(run),
        attempt=1,
    )
    ports.put(server.bind("127.0.0.1"))
    started = time.process_time()
    server.serve()
    server.close()
    if cpu is not None:
        cpu.put(time.process_time() - started)


def node(
    root: Path,
    address: str,
    worker: str,
    go: Event,
    cpu: "multiprocessing.Queue[float]",
    *,
    shape: Shape,
) -> None:
    """One rollout node: leases groups and pushes them, several at once; tells its CPU seconds."""

    async def main() -> None:
        run = Run(root)
        client = await RolloutClient.connect(
            address,
            keys=load_client_keys(run, role="rollout"),
            run=run.name,
            worker=worker,
            attempt=1,
        )
        leases = (await client.lease(shape.share * NUM_ROLLOUTS)).leases
        made = shape.group()
        while not go.is_set():
            await asyncio.sleep(0.01)

        async def produce(group_id: int) -> None:
            group = [replace(t, group_id=group_id) for t in made]
            results = await client.push(group)
            assert set(results.values()) == {"stored"}

        begun = time.process_time()
        await asyncio.gather(*(produce(lease.group_id) for lease in leases))
        cpu.put(time.process_time() - begun)
        await client.close()

    asyncio.run(main())


def durable(directory: Path, *, shape: Shape) -> Spent:
    """Until every trajectory was acked."""
    run = Run(directory / "run")
    run.root.mkdir()
    make_keys(run)
    ports: multiprocessing.Queue[int] = SPAWN.Queue()
    server_cpu: multiprocessing.Queue[float] = SPAWN.Queue()
    node_cpu: multiprocessing.Queue[float] = SPAWN.Queue()
    server = SPAWN.Process(target=serve, args=(run.root, ports, server_cpu))
    server.start()
    address = f"tcp://127.0.0.1:{ports.get(timeout=60)}"
    learner = LearnerClient(
        address, keys=load_client_keys(run, role="learner"), run=run.name, attempt=1
    )
    learner.announce(0, consumed=GroupIds(), filtered=0, step=0)
    go = SPAWN.Event()
    nodes = [
        SPAWN.Process(
            target=node,
            args=(run.root, address, f"w{i}", go, node_cpu),
            kwargs={"shape": shape},
        )
        for i in range(shape.num_nodes)
    ]
    for process in nodes:
        process.start()
    total = shape.share * shape.num_nodes
    while learner.status().leases < total:
        time.sleep(0.05)
    started = time.perf_counter()
    go.set()
    spent = sum(node_cpu.get(timeout=600) for _ in nodes)
    seconds = time.perf_counter() - started
    for process in nodes:
        process.join()
    written = learner.status().stored_bytes
    assert len(learner.take(total, timeout_seconds=60)) == total
    learner.finish("measured")
    learner.close()
    sides = (server_cpu.get(timeout=60), spent)
    server.join()
    return Spent(seconds=seconds, cpu=sides, written=written)


def report(results: dict[str, list[Spent]], *, shape: Shape) -> None:
    """The table, and what the cores allow."""
    megabytes = shape.num_bytes / 1e6
    rates = {n: statistics.median(megabytes / s.seconds for s in found)
             for n, found in results.items()}  # fmt: skip
    sides = {
        name: [statistics.median(s.cpu[i] * 1e3 / megabytes for s in found) for i in (0, 1)]
        for name, found in results.items()
    }
    print(f"{'path':<22}{'MB/s':>7}{'min-max':>12}{'groups/s':>10}{'of raw':>8}"
          f"{'of pipe':>9}{'CPU ms/MB':>11}{'of nodes':>10}")  # fmt: skip
    for name, found in results.items():
        every = [megabytes / s.seconds for s in found]
        rate = rates[name]
        print(
            f"{name:<22}{rate:>7.0f}{f'{min(every):.0f}-{max(every):.0f}':>12}"
            f"{rate * shape.num_groups / megabytes:>10.1f}{rate / rates['raw']:>8.2f}"
            f"{rate / rates['pipe, CURVE']:>9.2f}{sides[name][0]:>11.2f}{sides[name][1]:>10.2f}"
        )
    sent, written = results["frames, CURVE"][0].sent, results["buffer"][0].written
    print(
        f"bytes per token: {BYTES_PER_TOKEN} in arrays, "
        f"{sent * BYTES_PER_TOKEN / shape.num_bytes:.2f} sent, "
        f"{written * BYTES_PER_TOKEN / shape.num_bytes:.2f} written"
    )
    cores = cpu_count()
    # Whoever receives these frames and writes them, and does nothing else, spends so much.
    needed = sum(sides["frames, CURVE"]) + sides["raw"][0] * written / shape.num_bytes
    spent = sum(sides["buffer"])
    print(
        f"{cores} cores for both sides allow {cores * 1e3 / needed:.0f} MB/s to whoever encrypts, "
        f"sends, decrypts and writes these frames ({needed:.2f} ms/MB), and "
        f"{cores * 1e3 / spent:.0f} to the buffer and its nodes ({spent:.2f} ms/MB); "
        f"{rates['buffer'] * needed / cores / 1e3:.2f} of the former is reached"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    parser.add_argument("--mib", type=int, default=512, help="bytes of arrays per round")
    parser.add_argument("--tokens", type=int, default=8000, help="tokens per trajectory")
    parser.add_argument("--observed", type=float, default=0.0, help="share of observations")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    group_bytes = NUM_ROLLOUTS * given.tokens * BYTES_PER_TOKEN
    shape = Shape(
        num_groups=max((given.mib << 20) // group_bytes // given.nodes, 1) * given.nodes,
        num_tokens=given.tokens,
        num_nodes=given.nodes,
        observed=given.observed,
    )
    keep_freed_memory(KEEP_BYTES)
    paths: dict[str, Callable[[], Spent]] = {
        "raw": lambda: fresh(given.directory, partial(raw, num_bytes=shape.num_bytes)),
        "pipe": partial(pipe, shape=shape, curve=False, packed=False),
        "pipe, CURVE": partial(pipe, shape=shape, curve=True, packed=False),
        "frames, CURVE": partial(pipe, shape=shape, curve=True, packed=True),
        "buffer": lambda: fresh(given.directory, partial(durable, shape=shape)),
    }
    results: dict[str, list[Spent]] = {name: [] for name in paths}
    for _ in range(given.rounds):
        for name, measure in paths.items():
            results[name].append(measure())
    print(
        f"{shape.num_groups} groups of {NUM_ROLLOUTS} x {given.tokens} tokens, "
        f"{given.observed:.0%} observed, {shape.num_bytes / 1e6:.0f} MB, {given.nodes} nodes, "
        f"{cpu_count()} cores, load {os.getloadavg()[0]:.1f}, median of {given.rounds}"
    )
    report(results, shape=shape)


def fresh(directory: Path, measure: Callable[[Path], Spent]) -> Spent:
    """Measures in a directory of its own, removed afterwards."""
    place = Path(tempfile.mkdtemp(prefix="ingest-", dir=directory))
    try:
        return measure(place)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
