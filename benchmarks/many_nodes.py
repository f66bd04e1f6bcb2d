"""Many simulated rollout nodes on one buffer: latencies of lease, heartbeat and acked push.

    python benchmarks/many_nodes.py --nodes 200

The server is a real process; the nodes are real clients with connections of their own, on one event
loop, each leasing, heartbeating and pushing small groups all the time. Beside it: the same
exchange of one node alone (the floor).
"""

import argparse
import asyncio
import multiprocessing
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from ingest import serve
from ingest_limits import SPAWN, trajectory

from prorl_hpc.buffer.client import LearnerClient, RolloutClient
from prorl_hpc.buffer.keys import load_client_keys, make_keys
from prorl_hpc.buffer.messages import GroupIds
from prorl_hpc.run import Run

Samples = dict[str, list[float]]


async def timed(samples: Samples, name: str, awaitable: object) -> object:
    started = time.perf_counter()
    result = await awaitable  # type: ignore[misc]
    samples[name].append(time.perf_counter() - started)
    return result


async def node(run: Run, address: str, worker: str, *, until: float, samples: Samples) -> int:
    """Leases one group at a time and pushes its rollouts as they would come in: one by one."""
    keys = load_client_keys(run, role="rollout")
    client = await RolloutClient.connect(address, keys=keys, run=run.name, worker=worker, attempt=1)
    pushed = 0
    while time.perf_counter() < until:
        reply = await timed(samples, "lease", client.lease(16))
        for lease in reply.leases:  # type: ignore[attr-defined]
            await timed(samples, "heartbeat", client.heartbeat([lease.lease_id]))
            group = [trajectory(lease.group_id, r, num_tokens=500) for r in lease.rollouts]
            await timed(samples, "push", client.push(group))
            pushed += len(group)
    await client.close()
    return pushed


async def load(run: Run, address: str, *, num_nodes: int, seconds: float) -> tuple[Samples, int]:
    samples: Samples = {"lease": [], "heartbeat": [], "push": []}
    until = time.perf_counter() + seconds
    made = await asyncio.gather(
        *(
            node(run, address, f"n{num_nodes}-{i}", until=until, samples=samples)
            for i in range(num_nodes)
        )
    )
    return samples, sum(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=15.0)
    given = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="many-nodes-", dir=given.directory))
    try:
        run = Run(place / "run")
        run.root.mkdir()
        make_keys(run)
        ports: multiprocessing.Queue[int] = SPAWN.Queue()
        server = SPAWN.Process(target=serve, args=(run.root, ports))
        server.start()
        address = f"tcp://127.0.0.1:{ports.get(timeout=60)}"
        keys = load_client_keys(run, role="learner")
        learner = LearnerClient(address, keys=keys, run=run.name, attempt=1)
        learner.announce(0, consumed=GroupIds(), filtered=0, step=0)
        print(f"{'nodes':<8}{'what':<12}{'p50 ms':>10}{'p99 ms':>10}{'calls/s':>10}")
        for nodes in (1, given.nodes):
            samples, made = asyncio.run(load(run, address, num_nodes=nodes, seconds=given.seconds))
            for name, values in samples.items():
                middle, high = np.percentile(values, [50, 99]) * 1000
                rate = len(values) / given.seconds
                print(f"{nodes:<8}{name:<12}{middle:>10.1f}{high:>10.1f}{rate:>10.0f}")
            print(f"{nodes:<8}trajectories acked: {made / given.seconds:.0f}/s")
        learner.finish("measured")
        learner.close()
        server.join()
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
