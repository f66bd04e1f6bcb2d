"""What the ingest benchmark sends, and what it is measured against: the disk and a bare pipe."""

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zmq

from prorl_hpc.buffer import frames
from prorl_hpc.records import Kind, Trajectory

NUM_ROLLOUTS = 16
SHARD_BYTES = 32 << 20
BYTES_PER_TOKEN = 13
VOCABULARY = 150_000
NUM_TURNS = 16
PROMPT_TOKENS = 256

SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is sent."""

    num_groups: int
    num_tokens: int
    num_nodes: int
    observed: float

    @property
    def share(self) -> int:
        """Groups of one node."""
        return self.num_groups // self.num_nodes

    @property
    def num_bytes(self) -> int:
        return self.share * self.num_nodes * NUM_ROLLOUTS * self.num_tokens * BYTES_PER_TOKEN

    def group(self) -> list[Trajectory]:
        return [
            trajectory(0, r, num_tokens=self.num_tokens, observed=self.observed)
            for r in range(NUM_ROLLOUTS)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """One measurement."""

    seconds: float
    cpu: tuple[float, float]
    """CPU seconds of the receiving or writing side, and of the nodes."""
    sent: int = 0
    """Bytes of all frames."""
    written: int = 0


def trajectory(
    group_id: int, rollout: int, *, num_tokens: int, observed: float = 0.0
) -> Trajectory:
    """A prompt, then turns of sampled tokens and, after each, an observation."""
    rng = np.random.default_rng((group_id, rollout))
    place = np.arange(num_tokens) % max(num_tokens // NUM_TURNS, 1)
    sampled = place < (1 - observed) * max(num_tokens // NUM_TURNS, 1)
    sampled[: min(PROMPT_TOKENS, num_tokens // 4)] = False
    return Trajectory(
        group_id=group_id,
        rollout_index=rollout,
        kind=Kind.train,
        task="bench",
        instance_id=str(group_id),
        tokens=rng.integers(0, VOCABULARY, num_tokens, dtype=np.int32),
        loss_mask=sampled.astype(np.uint8),
        logprobs=np.where(sampled, -rng.exponential(size=num_tokens), 0).astype(np.float32),
        versions=np.where(sampled, 7, -1).astype(np.int32),
        reward=1.0,
    )


def plain_frames(group: Sequence[Trajectory]) -> list[frames.Frame]:
    """The arrays as they are, in frames of the size that the buffer's have."""
    found: list[frames.Frame] = []
    for name in ("tokens", "logprobs", "loss_mask", "versions"):
        data = np.concatenate([getattr(t, name) for t in group]).view(np.uint8).data
        found += [
            data[at : at + frames.BLOCK_BYTES] for at in range(0, len(data), frames.BLOCK_BYTES)
        ]
    return found


def packed_frames(group: Sequence[Trajectory]) -> list[frames.Frame]:
    body, arrays = frames.encode_push(group)
    return [frames.encode_body(body), *arrays]


def raw(directory: Path, *, num_bytes: int) -> Spent:
    """Writes and fsyncs that many bytes in files of shard size."""
    block = os.urandom(SHARD_BYTES)
    started, cpu = time.perf_counter(), time.process_time()
    for number in range(max(num_bytes // SHARD_BYTES, 1)):
        with (directory / f"raw-{number}").open("wb", buffering=0) as stream:
            stream.write(block)
            os.fsync(stream.fileno())
    spent = time.process_time() - cpu
    return Spent(seconds=time.perf_counter() - started, cpu=(spent, 0.0), written=num_bytes)


def push_all(
    address: str,
    server_key: bytes,
    cpu: "multiprocessing.Queue[float]",
    *,
    shape: Shape,
    packed: bool,
) -> None:
    """Sends every group as one message and waits for nothing."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUSH)
    if server_key:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = server_key
    socket.connect(address)
    group = shape.group()
    begun = time.process_time()
    for _ in range(shape.share):
        socket.send_multipart((packed_frames if packed else plain_frames)(group), copy=False)
    socket.close()
    context.term()
    cpu.put(time.process_time() - begun)


def pipe(*, shape: Shape, curve: bool, packed: bool) -> Spent:
    """Until all of it has arrived through PUSH/PULL."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pull = context.socket(zmq.PULL)
    public = b""
    if curve:
        public, pull.curve_secretkey = zmq.curve_keypair()
        pull.curve_publickey, pull.curve_server = public, True
    address = f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}"
    node_cpu: multiprocessing.Queue[float] = SPAWN.Queue()
    nodes = [
        SPAWN.Process(
            target=push_all,
            args=(address, public, node_cpu),
            kwargs={"shape": shape, "packed": packed},
        )
        for _ in range(shape.num_nodes)
    ]
    for node in nodes:
        node.start()
    first = pull.recv_multipart(copy=False)
    # The start of the processes isn't measured.
    started, cpu = time.perf_counter(), time.process_time()
    for _ in range(shape.share * shape.num_nodes - 1):
        pull.recv_multipart(copy=False)
    seconds, spent = time.perf_counter() - started, time.process_time() - cpu
    sides = (spent, sum(node_cpu.get(timeout=60) for _ in nodes))
    for node in nodes:
        node.join()
    pull.close()
    context.term()
    sent = sum(len(frame) for frame in first) * shape.share * shape.num_nodes
    return Spent(seconds=seconds, cpu=sides, sent=sent)
