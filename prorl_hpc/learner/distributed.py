"""The ranks of the learner and how they talk. Knows process groups; no model and no data.

One rank needs no process group at all. Several ranks form two: the default one for tensors (gloo
on CPU, nccl on GPU) and a gloo group for small Python objects, which never waits for a GPU.
"""

import datetime
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hpc.errors import HpcError

T = TypeVar("T")

MEETING_SECONDS = 600.0
"""How long the ranks of one job may take to find each other."""


class RanksError(HpcError, RuntimeError):
    """The ranks can't find each other, or disagree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among the learner's ranks."""

    rank: int
    world: int
    device: torch.device
    control: Any = None
    """gloo group for objects; None with a single rank."""
    background: Any = None
    """gloo group of the checkpoint threads, whose messages mustn't meet those of training."""
    memory: Any = None
    """One-dimensional mesh over the ranks' main memory; None with a single rank."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mesh(self) -> Any:
        """One-dimensional device mesh over all ranks."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self.device.type, (self.world,))

    def beside(self) -> "Ranks":
        """The same ranks for a thread beside training."""
        return replace(self, control=self.background)

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.world > 1:
            dist.barrier(group=self.control)

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums of named numbers over the ranks, added in rank order (so all ranks agree)."""
        totals: dict[str, float] = {}
        for part in self.gather(dict(values)):
            for name, value in part.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def all_true(self, flag: bool) -> bool:
        """Whether the flag holds on every rank."""
        return all(self.gather(flag))


def join(
    *,
    timeout_seconds: float,
    meeting_seconds: float = MEETING_SECONDS,
    stopping: Callable[[], bool] = lambda: False,
) -> Ranks:
    """Joins the ranks that RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* name; one rank without them.

    `timeout_seconds` bounds every later collective. Raises RanksError naming the ranks that don't
    come within `meeting_seconds`, or that were missing when `stopping()` said so.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    device = _device(int(os.environ.get("LOCAL_RANK", "0")))
    if world == 1:
        return Ranks(rank=0, world=1, device=device)
    from torch.distributed.device_mesh import init_device_mesh

    timeout = datetime.timedelta(seconds=timeout_seconds)
    try:
        store = _meet(rank, world, seconds=meeting_seconds, stopping=stopping)
        store.set_timeout(timeout)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timeout,
        )
        control = dist.new_group(backend="gloo", timeout=timeout)
        background = dist.new_group(backend="gloo", timeout=timeout)
        memory = init_device_mesh("cpu", (world,))
    except (RuntimeError, ValueError) as err:
        if isinstance(err, RanksError):
            raise
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RanksError(f"rank {rank} of {world} can't meet the others at {where}: {err}") from err
    return Ranks(
        rank=rank,
        world=world,
        device=device,
        control=control,
        background=background,
        memory=memory,
    )


def _meet(rank: int, world: int, *, seconds: float, stopping: Callable[[], bool]) -> Any:
    """The store of the ranks once all of them have come; short waits, so that a stop is seen."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline = time.monotonic() + seconds

    def give_up(who: str) -> None:
        left = deadline - time.monotonic()
        if left <= 0 or stopping():
            why = f"within {seconds:g} s" if left <= 0 else "before a stop was wanted"
            raise RanksError(
                f"rank {rank} of {world} waited at {host}:{port}: {who} didn't come {why}; "
                "see their logs"
            )

    store: Any = None
    while store is None:
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                port,
                world,
                is_master=rank == 0,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=30 if rank == 0 else 2),
            )
        except (RuntimeError, dist.DistNetworkError):
            if rank == 0:
                raise
            give_up("rank 0")
    store.set(f"here-{rank}", "")
    missing = set(range(world))
    while missing := {r for r in missing if not store.check([f"here-{r}"])}:
        give_up(f"rank {', '.join(map(str, sorted(missing)))}")
        time.sleep(0.1)
    return store


def leave(ranks: Ranks) -> None:
    """Ends the process groups."""
    if ranks.world > 1 and dist.is_initialized():
        dist.destroy_process_group()


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def use_determinism(device: torch.device) -> None:
    """Equal inputs give equal bits from here on; raises nothing for what torch can't promise."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=device.type != "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
