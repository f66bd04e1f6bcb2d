"""Real buffers for the tests: a server in a thread, trajectories of a chosen size."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from prorl_hpc.buffer.client import LearnerClient, RolloutClient
from prorl_hpc.buffer.config import BufferConfig
from prorl_hpc.buffer.keys import load_client_keys, load_server_keys, make_keys
from prorl_hpc.buffer.messages import GroupIds
from prorl_hpc.buffer.mixture import TaskShare
from prorl_hpc.buffer.server import BufferServer, Ended, ServerConfig
from prorl_hpc.records import Kind, Lease, Outcome, Trajectory
from prorl_hpc.run import Run

DEADLINE_SECONDS = 300.0


def make_config(**changes: object) -> BufferConfig:
    values: dict[str, object] = {
        "tasks": {"sums": TaskShare(weight=1.0, train_size=100)},
        "num_rollouts": 4,
        "batch_groups": 2,
        "max_staleness": 1,
        "seed": 7,
        "min_usable": 2,
        "group_deadline_seconds": 600.0,
        "lease_seconds": 60.0,
        "max_infrastructure_retries": 2,
        "deterministic": False,
    }
    return BufferConfig(**{**values, **changes})  # type: ignore[arg-type]


def make_trajectory(
    group_id: int,
    rollout: int,
    *,
    num_tokens: int = 8,
    version: int = 0,
    kind: Kind = Kind.train,
    task: str = "sums",
    outcome: Outcome = Outcome.scored,
    worker: str = "w0",
) -> Trajectory:
    rng = np.random.default_rng((group_id, rollout))
    mask = (np.arange(num_tokens) >= num_tokens // 2).astype(np.uint8)
    return Trajectory(
        group_id=group_id,
        rollout_index=rollout,
        kind=kind,
        task=task,
        instance_id=f"{task}-{group_id}",
        tokens=rng.integers(0, 1000, num_tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask == 1, -rng.random(num_tokens), 0.0).astype(np.float32),
        versions=np.where(mask == 1, version, -1).astype(np.int32),
        reward=None if outcome is Outcome.infrastructure_failure else float(rollout % 2),
        components={"correct": 1.0},
        outcome=outcome,
        timings={"run": 0.5},
        isolation={"kind": "none"},
        worker=worker,
        attempt=1,
    )


def produce(lease: Lease, *, version: int = 0, worker: str = "w0") -> list[Trajectory]:
    """What an honest node makes of a lease."""
    sampled = version if lease.policy_version is None else lease.policy_version
    return [
        make_trajectory(
            lease.group_id, r, version=sampled, kind=lease.kind, task=lease.task, worker=worker
        )
        for r in lease.rollouts
    ]


def make_run(path: Path) -> Run:
    run = Run(path)
    run.root.mkdir(parents=True, exist_ok=True)
    make_keys(run)
    return run


@contextmanager
def serving(
    run: Run,
    *,
    config: BufferConfig | None = None,
    server: ServerConfig | None = None,
    attempt: int = 1,
) -> Iterator["Running"]:
    """A server in a thread; stopped in good order at the end unless it has ended by itself."""
    running = Running(run, config=config, server=server, attempt=attempt)
    try:
        yield running
    finally:
        running.stop()


class Running:
    """One server and the ways to reach it."""

    def __init__(
        self,
        run: Run,
        *,
        config: BufferConfig | None = None,
        server: ServerConfig | None = None,
        attempt: int = 1,
    ) -> None:
        self.run = run
        self.server = BufferServer(
            run,
            config=config or make_config(),
            server=server
            or ServerConfig(seal_seconds=0.02, farewell_seconds=0.5, goodbye_seconds=0.1),
            keys=load_server_keys(run),
            attempt=attempt,
        )
        self.address = f"tcp://127.0.0.1:{self.server.bind('127.0.0.1')}"
        self.ended: Ended | BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.server.stop("the test is over")
        self.join()

    def join(self) -> None:
        self._thread.join(DEADLINE_SECONDS)
        assert not self._thread.is_alive()

    async def rollout(self, worker: str = "w0", *, attempt: int = 1) -> RolloutClient:
        return await RolloutClient.connect(
            self.address,
            keys=load_client_keys(self.run, role="rollout"),
            run=self.run.name,
            worker=worker,
            attempt=attempt,
            patience_seconds=DEADLINE_SECONDS,
        )

    def learner(self, *, attempt: int = 1, announce: bool = True) -> LearnerClient:
        client = LearnerClient(
            self.address,
            keys=load_client_keys(self.run, role="learner"),
            run=self.run.name,
            attempt=attempt,
            patience_seconds=DEADLINE_SECONDS,
        )
        if announce:
            client.announce(0, consumed=GroupIds(), filtered=0, step=0)
        return client

    def _serve(self) -> None:
        try:
            self.ended = self.server.serve()
        except BaseException as err:
            self.ended = err
        finally:
            self.server.close()


def wait_for(condition: Callable[[], bool], *, what: str) -> None:
    """Polls until the condition holds; fails after a generous deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_SECONDS} s for {what}"
        time.sleep(0.01)
