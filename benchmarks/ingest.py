"""Durable ingest of the buffer beside its physical limit and an unacknowledged pipe.

    python benchmarks/ingest.py --directory /path/on/the/file/system/to/measure

Rows: raw write + fsync of the same bytes in files of shard size; PUSH/PULL of the same frames
without any acknowledgement (same CURVE encryption); the buffer: real server process, real node
processes, bytes counted when acked (written, fsynced, renamed, listed in the manifest). All in
one run, alternating; the median of the rounds is shown, and the CPU time per megabyte of the
server (all its threads) and of the nodes, which a busy machine changes less than the rate. Where
cores are few, not the disk but encryption at both ends is the limit: see the pipe's row.
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

import numpy as np
import zmq

from prorl_hpc.buffer import frames
from prorl_hpc.buffer.client import LearnerClient, RolloutClient
from prorl_hpc.buffer.config import BufferConfig
from prorl_hpc.buffer.keys import load_client_keys, load_server_keys, make_keys
from prorl_hpc.buffer.messages import GroupIds
from prorl_hpc.buffer.mixture import TaskShare
from prorl_hpc.buffer.server import BufferServer, ServerConfig
from prorl_hpc.records import Kind, Trajectory
from prorl_hpc.run import Run

NUM_ROLLOUTS = 16
SHARD_BYTES = 32 << 20
BYTES_PER_TOKEN = 13

SPAWN = multiprocessing.get_context("spawn")


def trajectory(group_id: int, rollout: int, *, num_tokens: int) -> Trajectory:
    """Sampled tokens throughout."""
    return Trajectory(
        group_id=group_id,
        rollout_index=rollout,
        kind=Kind.train,
        task="bench",
        instance_id=str(group_id),
        tokens=np.full(num_tokens, rollout, dtype=np.int32),
        loss_mask=np.ones(num_tokens, dtype=np.uint8),
        logprobs=np.zeros(num_tokens, dtype=np.float32),
        versions=np.zeros(num_tokens, dtype=np.int32),
        reward=1.0,
    )


def raw_limit(directory: Path, *, num_bytes: int) -> float:
    """Seconds to write and fsync that many bytes in files of shard size."""
    block = os.urandom(SHARD_BYTES)
    started = time.perf_counter()
    for number in range(max(num_bytes // SHARD_BYTES, 1)):
        with (directory / f"raw-{number}").open("wb", buffering=0) as stream:
            stream.write(block)
            os.fsync(stream.fileno())
    return time.perf_counter() - started


def push_all(address: str, server_key: bytes, *, num_groups: int, num_tokens: int) -> None:
    """Sends every group as one message and waits for nothing."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = server_key
    socket.connect(address)
    for group in range(num_groups):
        body, arrays = frames.encode_push(
            [trajectory(group, r, num_tokens=num_tokens) for r in range(NUM_ROLLOUTS)]
        )
        socket.send_multipart([frames.encode_body(body), *arrays], copy=False)
    socket.close()
    context.term()


def unacked(*, num_groups: int, num_tokens: int, num_nodes: int) -> float:
    """Seconds until all of it has arrived through PUSH/PULL."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pull = context.socket(zmq.PULL)
    public, pull.curve_secretkey = zmq.curve_keypair()
    pull.curve_publickey, pull.curve_server = public, True
    address = f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}"
    nodes = [
        SPAWN.Process(
            target=push_all,
            args=(address, public),
            kwargs={"num_groups": num_groups // num_nodes, "num_tokens": num_tokens},
        )
        for _ in range(num_nodes)
    ]
    for node in nodes:
        node.start()
    pull.recv_multipart(copy=False)
    started = time.perf_counter()  # start-up of the processes isn't measured
    for _ in range(num_groups // num_nodes * num_nodes - 1):
        pull.recv_multipart(copy=False)
    seconds = time.perf_counter() - started
    for node in nodes:
        node.join()
    pull.close()
    context.term()
    return seconds


def serve(
    root: Path,
    ports: "multiprocessing.Queue[int]",
    cpu: "multiprocessing.Queue[float] | None" = None,
) -> None:
    """The buffer's process; tells its port, and at the end the CPU seconds of its service."""
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
    num_groups: int,
    num_tokens: int,
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
        leases = (await client.lease(num_groups * NUM_ROLLOUTS)).leases
        made = [trajectory(0, r, num_tokens=num_tokens) for r in range(NUM_ROLLOUTS)]
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


def durable(
    directory: Path,
    *,
    num_groups: int,
    num_tokens: int,
    num_nodes: int,
    cpu: dict[str, list[float]],
) -> float:
    """Seconds until every trajectory was acked; adds CPU seconds of server and nodes to `cpu`."""
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
    share = num_groups // num_nodes
    nodes = [
        SPAWN.Process(
            target=node,
            args=(run.root, address, f"w{i}", go, node_cpu),
            kwargs={"num_groups": share, "num_tokens": num_tokens},
        )
        for i in range(num_nodes)
    ]
    for process in nodes:
        process.start()
    while learner.status().leases < share * num_nodes:
        time.sleep(0.05)
    started = time.perf_counter()
    go.set()
    for process in nodes:
        process.join()
    seconds = time.perf_counter() - started
    taken = learner.take(share * num_nodes, timeout_seconds=60)
    assert len(taken) == share * num_nodes
    learner.finish("measured")
    learner.close()
    cpu["server"].append(server_cpu.get(timeout=60))
    cpu["nodes"].append(sum(node_cpu.get(timeout=60) for _ in nodes))
    server.join()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    parser.add_argument("--mib", type=int, default=512, help="bytes of arrays per round")
    parser.add_argument("--tokens", type=int, default=8000, help="tokens per trajectory")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    group_bytes = NUM_ROLLOUTS * given.tokens * BYTES_PER_TOKEN
    groups = max((given.mib << 20) // group_bytes // given.nodes, 1) * given.nodes
    size = groups * group_bytes
    results: dict[str, list[float]] = {
        "raw write + fsync": [],
        "PUSH/PULL, no ack": [],
        "buffer": [],
    }
    cpu: dict[str, list[float]] = {"server": [], "nodes": []}
    for _ in range(given.rounds):
        shape = {"num_groups": groups, "num_tokens": given.tokens, "num_nodes": given.nodes}
        results["raw write + fsync"].append(
            fresh(given.directory, partial(raw_limit, num_bytes=size))
        )
        results["PUSH/PULL, no ack"].append(unacked(**shape))
        results["buffer"].append(fresh(given.directory, partial(durable, **shape, cpu=cpu)))
    limit = statistics.median(results["raw write + fsync"])
    pipe = statistics.median(results["PUSH/PULL, no ack"])
    print(
        f"{groups} groups of {NUM_ROLLOUTS} x {given.tokens} tokens, {size / 1e6:.0f} MB, "
        f"{given.nodes} nodes, {os.cpu_count()} cores, median of {given.rounds}"
    )
    print(f"{'path':<20}{'MB/s':>10}{'groups/s':>10}{'of raw':>8}{'of pipe':>9}")
    for name, seconds in results.items():
        median = statistics.median(seconds)
        print(
            f"{name:<20}{size / 1e6 / median:>10.0f}{groups / median:>10.1f}{limit / median:>8.2f}"
            f"{pipe / median:>9.2f}"
        )
    shares = ", ".join(
        f"{name} {statistics.median(seconds) * 1e9 / size:.2f}" for name, seconds in cpu.items()
    )
    print(f"CPU ms per MB of the buffer: {shares}")


def fresh(directory: Path, measure: Callable[[Path], float]) -> float:
    """Measures in a directory of its own, removed afterwards."""
    place = Path(tempfile.mkdtemp(prefix="ingest-", dir=directory))
    try:
        return measure(place)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
