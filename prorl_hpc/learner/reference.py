"""The reference policy: a copy of this rank's shards, and its identity. Knows no schedule.

A reset copies the policy's shards, without communication, so that policy and reference are equal
bit for bit and KL is exactly zero on the next batch. To score with the reference, its shards and
the policy's change places for the duration of a `with` block: one model in memory does both. In
between, the reference's shards lie beside the policy's, or in main memory. With adapters only
these are copied: the base under them is the same for both.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor

from hpc.errors import HpcError
from prorl_hpc.choices import ReferencePlacement
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.model import PolicyModel, copy_to_memory, local, reshard


class ReferenceMismatch(HpcError, ValueError):
    """A reference that isn't the one its identity names."""


class ReferenceIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Which policy the reference is; part of the checkpoint."""

    index: int
    """0 for the starting policy, then the number of the reset that made it."""
    step: int
    """Optimizer step of the policy it was copied from."""
    sha256: str
    """Of all its tensors, whole and in name order: the same for every number of ranks and place."""


class Reference:
    """The frozen policy that KL is measured against."""

    def __init__(self, tensors: dict[str, Tensor], identity: ReferenceIdentity) -> None:
        self.tensors = tensors
        """By name; sharded as the policy's parameters are."""
        self.identity = identity

    @classmethod
    def of(
        cls,
        model: PolicyModel,
        *,
        index: int,
        step: int,
        ranks: Ranks,
        placement: ReferencePlacement = ReferencePlacement.device,
    ) -> "Reference":
        """A copy of the policy as it is now."""
        tensors = {
            name: _copy(p.detach(), placement=placement, ranks=ranks)
            for name, p in model.named_weights()
        }
        sha256 = hash_tensors(tensors, ranks=ranks)
        return cls(tensors, ReferenceIdentity(index=index, step=step, sha256=sha256))

    @classmethod
    def blank(
        cls,
        model: PolicyModel,
        identity: ReferenceIdentity,
        *,
        ranks: Ranks,
        placement: ReferencePlacement = ReferencePlacement.device,
    ) -> "Reference":
        """Tensors of the right shapes in the right place, for a checkpoint to fill."""
        tensors = {
            name: _copy(p.detach(), placement=placement, ranks=ranks)
            for name, p in model.named_weights()
        }
        return cls(tensors, identity)

    @contextmanager
    def in_place(self, model: PolicyModel) -> Iterator[None]:
        """Within the block the model computes as the reference."""
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    def verify(self, *, ranks: Ranks) -> None:
        """Raises ReferenceMismatch when the tensors aren't those of the identity."""
        found = hash_tensors(self.tensors, ranks=ranks)
        if found != self.identity.sha256:
            raise ReferenceMismatch(
                f"reference {self.identity.index} of step {self.identity.step} has sha256 "
                f"{found[:12]}..., its checkpoint says {self.identity.sha256[:12]}...; "
                "resume from another checkpoint"
            )

    def _exchange(self, model: PolicyModel) -> None:
        reshard(model)
        with torch.no_grad():
            for name, parameter in model.named_weights():
                here, there = local(parameter), local(self.tensors[name])
                kept = here.clone()
                here.copy_(there)
                there.copy_(kept)


def _copy(tensor: Tensor, *, placement: ReferencePlacement, ranks: Ranks) -> Tensor:
    if placement is ReferencePlacement.cpu:
        return copy_to_memory(tensor, ranks=ranks)
    return tensor.clone()


def hash_tensors(tensors: dict[str, Tensor], *, ranks: Ranks) -> str:
    """sha256 over the whole tensors in name order, on every rank."""
    from torch.distributed.tensor import DTensor

    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if ranks.is_first:
            digest.update(name.encode())
            digest.update(full.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return ranks.broadcast(digest.hexdigest())
