"""A trajectory as it travels and lies on disk: without what its arrays repeat. Knows no socket.

Mask and version hold for whole segments, so they are kept as runs; log-probabilities are zero
where nothing was sampled, so only those of sampled tokens are kept; a token id takes three bytes.
Of 13 bytes per token that leaves 3 for a prompt's or an observation's and 7 for a sampled one.
Nothing is lost: a trajectory comes back bit for bit.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prorl_hpc.buffer.messages import Row
from prorl_hpc.records import Kind, Outcome, Trajectory

RUN = np.dtype([("length", "<u4"), ("version", "<i4"), ("loss_mask", "u1")])
"""Consecutive tokens with one version and one mask value. `length` is at least 1."""

BYTES_PER_TOKEN = 3


@dataclass(kw_only=True, slots=True, eq=False)
class Block:
    """Arrays of consecutive trajectories, one after another in one message."""

    num_rows: int
    low: NDArray[np.uint16]
    high: NDArray[np.uint8]
    logprobs: NDArray[np.float32]


@dataclass(kw_only=True, slots=True, eq=False)
class Parcel:
    """One trajectory; its arrays, little-endian and contiguous, may be views of a message."""

    row: Row
    kind: Kind
    outcome: Outcome
    low: NDArray[np.uint16]
    """[T] token ids, but for ..."""
    high: NDArray[np.uint8]
    """[T] ... their bits from 16 on."""
    logprobs: NDArray[np.float32]
    """[S] of the sampled tokens, all others being 0; or [T]."""
    runs: NDArray[np.void]
    """[R] of dtype RUN; their lengths add up to T."""
    block: Block | None = None
    """Where its arrays lie, if together with others'."""

    @property
    def key(self) -> tuple[int, int]:
        return (self.row.group_id, self.row.rollout_index)

    @property
    def group_id(self) -> int:
        return self.row.group_id

    @property
    def rollout_index(self) -> int:
        return self.row.rollout_index

    @property
    def task(self) -> str:
        return self.row.task

    @property
    def instance_id(self) -> str:
        return self.row.instance_id

    @property
    def reward(self) -> float | None:
        return self.row.reward

    @property
    def finish_reason(self) -> str:
        return self.row.finish_reason

    @property
    def worker(self) -> str:
        return self.row.worker

    @property
    def detail(self) -> str:
        return self.row.detail

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays, as they are here."""
        row = self.row
        return BYTES_PER_TOKEN * row.length + 4 * row.num_logprobs + RUN.itemsize * row.num_runs

    def sampled_only_by(self, version: int) -> bool:
        """Whether no other policy version sampled a token of it."""
        return bool((self.runs["version"][self.runs["loss_mask"] == 1] == version).all())

    def trajectory(self) -> Trajectory:
        """With all its arrays."""
        loss_mask = np.repeat(self.runs["loss_mask"], self.runs["length"])
        logprobs = self.logprobs
        if logprobs.shape != loss_mask.shape:
            logprobs = np.zeros(loss_mask.shape, dtype=np.float32)
            logprobs[loss_mask.view(np.bool_)] = self.logprobs
        tokens = self.high.astype(np.int32)
        tokens <<= 16
        tokens |= self.low
        row = self.row
        return Trajectory(
            group_id=row.group_id,
            rollout_index=row.rollout_index,
            kind=self.kind,
            task=row.task,
            instance_id=row.instance_id,
            tokens=tokens,
            loss_mask=loss_mask,
            logprobs=logprobs.astype(np.float32, copy=False),
            versions=np.repeat(self.runs["version"], self.runs["length"]).astype(np.int32),
            reward=row.reward,
            components=row.components,
            outcome=self.outcome,
            finish_reason=row.finish_reason,
            timings=row.timings,
            isolation=row.isolation,
            worker=row.worker,
            attempt=row.attempt,
            detail=row.detail,
        )


def pack(t: Trajectory) -> Parcel:
    """Looks at no value: `Trajectory.check` does. May share the memory of its arrays."""
    runs = runs_of(t.loss_mask, t.versions)
    logprobs = _needed(t, runs)
    row = Row(
        group_id=t.group_id,
        rollout_index=t.rollout_index,
        kind=t.kind.value,
        task=t.task,
        instance_id=t.instance_id,
        length=int(t.tokens.shape[0]),
        reward=None if t.reward is None else float(t.reward),
        components=t.components,
        outcome=t.outcome.value,
        finish_reason=t.finish_reason,
        timings=t.timings,
        isolation=t.isolation,
        worker=t.worker,
        attempt=t.attempt,
        # Names that a sandbox chose may stand in it, and needn't be text.
        detail=t.detail.encode("utf-8", "replace").decode(),
        num_logprobs=int(logprobs.shape[0]),
        num_runs=int(runs.shape[0]),
    )
    return Parcel(
        row=row,
        kind=t.kind,
        outcome=t.outcome,
        low=t.tokens.astype("<u2"),
        high=(t.tokens >> 16).astype(np.uint8),
        logprobs=np.ascontiguousarray(logprobs, "<f4"),
        runs=runs,
    )


def join_arrays(arrays: Iterable[NDArray[Any]]) -> bytes:
    """Their memory, one after another; numpy's own way costs more than the bytes do."""
    return b"".join(arrays)  # type: ignore[arg-type]


def runs_of(loss_mask: NDArray[np.uint8], versions: NDArray[np.int32]) -> NDArray[np.void]:
    """Mask and versions as runs."""
    length = loss_mask.shape[0]
    if not length:
        return np.empty(0, dtype=RUN)
    changes = (loss_mask[1:] != loss_mask[:-1]) | (versions[1:] != versions[:-1])
    starts = np.flatnonzero(changes) + 1
    bounds = np.concatenate(([0], starts, [length]))
    runs = np.empty(bounds.shape[0] - 1, dtype=RUN)
    runs["length"] = bounds[1:] - bounds[:-1]
    runs["version"] = versions[bounds[:-1]]
    runs["loss_mask"] = loss_mask[bounds[:-1]]
    return runs


def _needed(t: Trajectory, runs: NDArray[np.void]) -> NDArray[np.float32]:
    """Log-probabilities of sampled tokens, if all others are 0 to the bit; else all.

    A view where it is one piece.
    """
    masks, lengths = runs["loss_mask"].tolist(), runs["length"].tolist()
    if masks == [1]:
        return t.logprobs
    bits = t.logprobs.view(np.int32)
    if masks == [0, 1]:  # a prompt and an answer: nothing is to be copied
        return t.logprobs if bits[: lengths[0]].any() else t.logprobs[lengths[0] :]
    if max(masks, default=0) > 1:
        return t.logprobs
    sampled = t.logprobs[t.loss_mask.view(np.bool_)]
    elsewhere = np.count_nonzero(bits) - np.count_nonzero(sampled.view(np.int32))
    return t.logprobs if elsewhere else sampled
