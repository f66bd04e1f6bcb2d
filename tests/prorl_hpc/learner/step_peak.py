"""Peak bytes of a learner's whole step.

With several ranks this process is rank 0 of a process group that moves nothing (torch's "fake"
backend): the values are garbage, sizes and lifetimes are real.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prorl_hpc.learner.batches import Sample
from prorl_hpc.learner.checkpoint import snapshot
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.model import build_policy
from prorl_hpc.learner.objective import objective_config
from prorl_hpc.learner.optimizer import build_optimizer
from prorl_hpc.learner.step import Stepper
from prorl_hpc.recipe import Recipe

from .live_bytes import LiveBytes


class Alone(Ranks):
    """Rank 0 of ranks that aren't there: what it hears is its own voice."""

    __slots__ = ()

    def broadcast(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world


@contextmanager
def ranks_of(world: int) -> Iterator[Ranks]:
    """So many ranks, of which only the first is there."""
    device = torch.device("cpu")
    if world == 1:
        yield Ranks(rank=0, world=1, device=device)
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        memory = init_device_mesh("cpu", (world,))
        yield Alone(rank=0, world=world, device=device, memory=memory)
    finally:
        dist.destroy_process_group()


def measure(recipe: Recipe, directory: Path) -> int:
    """Peak of the second step, with a copy for a checkpoint on its way where there is one."""
    with ranks_of(recipe.learner.nodes * recipe.learner.ranks_per_node) as ranks:
        return _measure(recipe, directory, ranks=ranks)


def _measure(recipe: Recipe, directory: Path, *, ranks: Ranks) -> int:
    model = build_policy(
        directory, recipe.model, ranks=ranks, chunk_tokens=recipe.learner.head_chunk_tokens
    )
    stepper = Stepper(
        model=model,
        optimizer=build_optimizer([p for _, p in model.named_weights()], config=recipe.algorithm),
        algorithm=recipe.algorithm,
        objective=objective_config(recipe.algorithm, max_new_tokens=64),
        ranks=ranks,
        tokens_per_micro_batch=recipe.learner.tokens_per_micro_batch,
        reference_placement=recipe.learner.reference_placement,
    )
    samples = _samples(recipe)
    rewards = [sample.reward for sample in samples]
    copy = None
    with LiveBytes() as meter:
        meter.follow(model.parameters())
        stepper.renew_reference(index=0, step=0)
        stepper.run(samples, rewards, step=0)
        if not recipe.learner.deterministic:
            copy = snapshot(model, stepper.optimizer, stepper.reference, ranks=ranks)
        meter.restart()
        stepper.run(samples, rewards, step=1)
    del copy
    return meter.peak


def _samples(recipe: Recipe) -> list[Sample]:
    """As many full micro-batches as two per rank, each of one sample of the whole context."""
    rng = np.random.default_rng(0)
    length = recipe.model.context_tokens
    per_batch = max(1, recipe.learner.tokens_per_micro_batch // length)
    count = 2 * per_batch * recipe.learner.nodes * recipe.learner.ranks_per_node
    sampled = np.arange(length // 4, length)
    return [
        Sample(
            group_id=index // 2,
            task="t",
            tokens=rng.integers(0, 5, length).astype(np.int32),
            sampled=sampled,
            sampler_logprobs=np.full(len(sampled), -5.0, dtype=np.float32),
            reward=float(index % 2),
            stopped=True,
            oldest_version=0,
            temperature=1.0,
        )
        for index in range(count)
    ]
