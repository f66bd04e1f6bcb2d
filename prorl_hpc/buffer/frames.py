"""Messages to frames and back. Knows bytes, no socket.

Layout of a multipart message: `[envelope, body, tokens, logprobs, loss_mask, versions]`; the last
four only with a `Push`: the arrays of all its rows, one after another, little-endian.
"""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from prorl_hpc.buffer.messages import (
    FORMAT,
    AnyReply,
    AnyRequest,
    Envelope,
    Push,
    Row,
    WireError,
)
from prorl_hpc.records import Kind, Outcome, RecordError, Trajectory

Frame = bytes | memoryview
ARRAYS = (("tokens", "<i4"), ("logprobs", "<f4"), ("loss_mask", "u1"), ("versions", "<i4"))

_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_requests = msgspec.msgpack.Decoder(AnyRequest)
_replies = msgspec.msgpack.Decoder(AnyReply)
_T = TypeVar("_T")


def encode(envelope: Envelope, body: AnyRequest | AnyReply) -> list[bytes]:
    """The two header frames of a message."""
    return [_encoder.encode(envelope), _encoder.encode(body)]


def encode_body(body: AnyRequest | AnyReply) -> bytes:
    """The body's frame alone."""
    return _encoder.encode(body)


def decode_envelope(frame: Frame) -> Envelope:
    """Raises WireError for garbage or another format number."""
    envelope = _decode(_envelopes, frame)
    if envelope.format != FORMAT:
        raise WireError(
            f"format={envelope.format} of a message; this side speaks {FORMAT}: use one version of "
            "prorl-hpc for the whole run"
        )
    return envelope


def decode_request(frame: Frame) -> AnyRequest:
    """Raises WireError for garbage."""
    return _decode(_requests, frame)


def decode_reply(frame: Frame) -> AnyReply:
    """Raises WireError for garbage."""
    return _decode(_replies, frame)


def encode_push(trajectories: Sequence[Trajectory]) -> tuple[Push, list[Frame]]:
    """Body and array frames of one push. Raises RecordError for a bad trajectory.

    The frames of a single trajectory are its own memory: don't write to it before the ack.
    """
    rows = tuple(_row(t.check()) for t in trajectories)
    arrays: list[Frame] = []
    for name, dtype in ARRAYS:
        parts = [getattr(t, name) for t in trajectories]
        flat = np.concatenate(parts) if len(parts) != 1 else parts[0]
        arrays.append(np.ascontiguousarray(flat, dtype=dtype).view(np.uint8).data)
    return Push(rows=rows), arrays


def decode_push(push: Push, frames: Sequence[Frame]) -> list[Trajectory]:
    """Trajectories over the frames' memory. Raises WireError when frames and rows disagree."""
    if len(frames) != len(ARRAYS):
        raise WireError(f"push with {len(frames)} array frames; want {len(ARRAYS)}")
    total = sum(row.length for row in push.rows)
    arrays: list[NDArray[np.generic]] = []
    for (name, dtype), frame in zip(ARRAYS, frames, strict=True):
        size = len(frame)
        if size != total * np.dtype(dtype).itemsize or any(row.length < 0 for row in push.rows):
            raise WireError(f"frame {name} of a push has {size} bytes for {total} tokens")
        arrays.append(np.frombuffer(frame, dtype=dtype))
    trajectories, start = [], 0
    for row in push.rows:
        part = slice(start, start + row.length)
        start += row.length
        trajectories.append(_trajectory(row, [a[part] for a in arrays]))
    return trajectories


def _row(t: Trajectory) -> Row:
    return Row(
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
    )


def _trajectory(row: Row, arrays: list[NDArray[np.generic]]) -> Trajectory:
    tokens, logprobs, loss_mask, versions = arrays
    try:
        return Trajectory(
            group_id=row.group_id,
            rollout_index=row.rollout_index,
            kind=Kind(row.kind),
            task=row.task,
            instance_id=row.instance_id,
            tokens=tokens.astype(np.int32, copy=False),
            loss_mask=loss_mask.astype(np.uint8, copy=False),
            logprobs=logprobs.astype(np.float32, copy=False),
            versions=versions.astype(np.int32, copy=False),
            reward=row.reward,
            components=row.components,
            outcome=Outcome(row.outcome),
            finish_reason=row.finish_reason,
            timings=row.timings,
            isolation=row.isolation,
            worker=row.worker,
            attempt=row.attempt,
            detail=row.detail,
        ).check()
    except (RecordError, ValueError) as err:
        raise WireError(f"push of ({row.group_id}, {row.rollout_index}): {err}") from err


def _decode(decoder: "msgspec.msgpack.Decoder[_T]", frame: Frame) -> _T:
    try:
        return decoder.decode(frame)
    except msgspec.MsgspecError as err:
        raise WireError(f"a message can't be decoded: {err}") from err
