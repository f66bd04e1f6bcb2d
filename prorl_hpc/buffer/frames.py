"""Messages to frames and back. Knows bytes, no socket.

Layout of a multipart message: `[envelope, body]`, and with a `Push` `[envelope, body, runs,
tokens, logprobs, tokens, logprobs, ...]`: the runs of all its rows, then a pair of frames for each
block of rows (see `parcel` for what they hold; in `tokens`, all low halves come before the high
bytes). Little-endian. Frames are kept small enough for a processor's cache: each is copied,
encrypted, authenticated, decrypted and hashed as a whole.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

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
from prorl_hpc.buffer.parcel import BYTES_PER_TOKEN, RUN, Block, Parcel, join_arrays, pack
from prorl_hpc.records import Kind, Outcome, RecordError, Trajectory, check_components, check_reward

Frame = bytes | memoryview

BLOCK_BYTES = 256 << 10
"""A frame has about so many bytes; a longer trajectory has one of its own."""

LOW, LOGPROB = np.dtype("<u2"), np.dtype("<f4")

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

    Frames may be a trajectory's own memory: don't write to it before the ack.
    """
    return encode_parcels([pack(t.check()) for t in trajectories])


def encode_parcels(parcels: Sequence[Parcel]) -> tuple[Push, list[Frame]]:
    """Body and array frames of one push of trajectories that were checked."""
    blocks = list(_blocks(parcels))
    arrays: list[Frame] = [join_arrays(p.runs for p in parcels)]
    for block in blocks:
        arrays.append(join_arrays([*(p.low for p in block), *(p.high for p in block)]))
        arrays.append(join_arrays(p.logprobs for p in block))
    rows = tuple(p.row for p in parcels)
    return Push(rows=rows, blocks=tuple(len(block) for block in blocks)), arrays


def decode_push(push: Push, frames: Sequence[Frame]) -> list[Parcel]:
    """Parcels over the frames' memory. Raises WireError when frames and rows disagree."""
    rows, sizes = push.rows, push.blocks
    if len(frames) != 1 + 2 * len(sizes):
        raise WireError(f"push with {len(frames)} array frames; want {1 + 2 * len(sizes)}")
    if sum(sizes) != len(rows) or any(size < 1 for size in sizes):
        raise WireError(f"push of {len(rows)} rows in blocks of {sizes[:8]}: a frame is missing")
    if any(row.length < 0 or row.num_logprobs < 0 or row.num_runs < 0 for row in rows):
        raise WireError("push with a negative number of elements in a frame")
    runs = _array("runs", RUN, frames[0], sum(row.num_runs for row in rows))
    check_runs(rows, runs)
    parcels: list[Parcel] = []
    first_run = 0
    for index, size in enumerate(sizes):
        members = rows[len(parcels) : len(parcels) + size]
        block = _block(members, frames[1 + 2 * index], frames[2 + 2 * index])
        first = first_logprob = 0
        for row in members:
            last, last_logprob = first + row.length, first_logprob + row.num_logprobs
            last_run = first_run + row.num_runs
            kind, outcome = _checked(row)
            parcels.append(
                Parcel(
                    row=row,
                    kind=kind,
                    outcome=outcome,
                    low=block.low[first:last],
                    high=block.high[first:last],
                    logprobs=block.logprobs[first_logprob:last_logprob],
                    runs=runs[first_run:last_run],
                    block=block,
                )
            )
            first, first_logprob, first_run = last, last_logprob, last_run
    return parcels


def check_runs(rows: Sequence[Row], runs: NDArray[np.void]) -> None:
    """Raises WireError unless the runs cover each row exactly, and its log-probabilities fit."""
    lengths = runs["length"].astype(np.int64)
    if runs.shape[0] and (runs["loss_mask"].max() > 1 or lengths.min() < 1):
        raise WireError("frame runs of a push has an empty run, or a mask value above 1")
    # Sums up to each row's end: the differences are the rows' own.
    ends = np.cumsum([0, *(row.num_runs for row in rows)])
    tokens = np.diff(np.concatenate(([0], np.cumsum(lengths)))[ends])
    sampled = np.cumsum(np.where(runs["loss_mask"] == 1, lengths, 0))
    samples = np.diff(np.concatenate(([0], sampled))[ends])
    for row, length, num_sampled in zip(rows, tokens.tolist(), samples.tolist(), strict=True):
        if row.length != length:
            raise WireError(
                f"frame runs of a push: runs of ({row.group_id}, {row.rollout_index}) cover "
                f"{length} tokens of {row.length}"
            )
        if row.num_logprobs not in (length, num_sampled):
            raise WireError(
                f"frame logprobs of a push: ({row.group_id}, {row.rollout_index}) has "
                f"{row.num_logprobs} for {num_sampled} sampled tokens of {length}"
            )


def _blocks(parcels: Sequence[Parcel]) -> Iterator[list[Parcel]]:
    block: list[Parcel] = []
    size = 0
    for parcel in parcels:
        if block and size + 4 * parcel.row.length > BLOCK_BYTES:
            yield block
            block, size = [], 0
        block.append(parcel)
        size += 4 * parcel.row.length
    if block:
        yield block


def _array(name: str, dtype: np.dtype[Any], frame: Frame, count: int) -> NDArray[Any]:
    if len(frame) != count * dtype.itemsize:
        raise WireError(f"frame {name} of a push has {len(frame)} bytes for {count} elements")
    return np.frombuffer(frame, dtype=dtype)


def _block(rows: Sequence[Row], tokens: Frame, logprobs: Frame) -> Block:
    total = sum(row.length for row in rows)
    flat = _array("tokens", np.dtype("u1"), tokens, BYTES_PER_TOKEN * total)
    return Block(
        num_rows=len(rows),
        low=flat[: 2 * total].view(LOW),
        high=flat[2 * total :],
        logprobs=_array("logprobs", LOGPROB, logprobs, sum(row.num_logprobs for row in rows)),
    )


def _checked(row: Row) -> tuple[Kind, Outcome]:
    try:
        name = f"trajectory ({row.group_id}, {row.rollout_index})"
        kind, outcome = Kind(row.kind), Outcome(row.outcome)
        check_reward(row.reward, outcome=outcome, name=name)
        check_components(row.components, name=name)
    except (RecordError, ValueError) as err:
        raise WireError(f"push of ({row.group_id}, {row.rollout_index}): {err}") from err
    return kind, outcome


def _decode(decoder: "msgspec.msgpack.Decoder[_T]", frame: Frame) -> _T:
    try:
        return decoder.decode(frame)
    except msgspec.MsgspecError as err:
        raise WireError(f"a message can't be decoded: {err}") from err
