"""Attention over packed documents. Knows the layout of a micro-batch, no model and no task.

Shapes: T packed tokens, H heads, K key/value heads, E head dimension, D documents of one bucket,
L padded length of that bucket.

A micro-batch is one row of T tokens, documents one after the other. Documents must not see each
other. Instead of a [T, T] mask, documents are gathered into few rectangular batches by length
(padded at the end, where a causal query never looks), attended with plain causal attention, and
scattered back: exact, no mask in memory, and the work of short documents stays quadratic in their
own length only. Where flash-attn is installed, transformers' own variable-length path is used.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from hpc.errors import UserError
from prorl_hpc.choices import Attention

NAME = "prorl_documents"
"""Name under which the attention is registered with transformers."""


class AttentionError(UserError, ValueError):
    """An attention implementation that can't be used here."""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Documents of similar length, as a rectangle."""

    gather: Tensor
    """[D, L] token positions; padding repeats the document's first token."""
    valid: Tensor
    """[D * L] true where `gather` isn't padding."""


@dataclass(frozen=True, slots=True, eq=False)
class DocumentLayout:
    """Where the documents of a packed micro-batch lie."""

    buckets: tuple[Bucket, ...]
    position_ids: Tensor
    """[1, T] position of each token in its document; its attribute `buckets` are those above."""


def document_layout(lengths: list[int], *, device: torch.device | str = "cpu") -> DocumentLayout:
    """Layout of documents of these lengths (each at least 1), packed in this order."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths={lengths} must be non-empty, each at least 1")
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length)
    by_size: dict[int, list[int]] = {}
    for document, length in enumerate(lengths):
        # Powers of two: at most half of a rectangle is padding, and there are few rectangles.
        by_size.setdefault((length - 1).bit_length(), []).append(document)
    buckets = []
    for _, documents in sorted(by_size.items()):
        size_D = torch.tensor([lengths[document] for document in documents])
        start_D = torch.tensor([starts[document] for document in documents])
        offset_L = torch.arange(int(size_D.max()))
        valid_DL = offset_L < size_D[:, None]
        gather_DL = start_D[:, None] + torch.where(valid_DL, offset_L, 0)
        buckets.append(Bucket(gather_DL.to(device), valid_DL.reshape(-1).to(device)))
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    position_ids: Any = positions_T[None].to(device)
    position_ids.buckets = tuple(buckets)
    return DocumentLayout(position_ids.buckets, position_ids)


def document_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function in transformers' interface: [1, H, T, E] in, [1, T, H, E] out.

    The layout comes with the positions, the one argument that every architecture hands down.
    """
    buckets: tuple[Bucket, ...] | None = getattr(position_ids, "buckets", None)
    if buckets is None:
        raise ValueError(
            f"{NAME} needs the layout's own position_ids; this architecture doesn't hand them "
            "down: set model.attention=sdpa"
        )
    longest = max(bucket.gather.shape[1] for bucket in buckets)
    if sliding_window is not None and longest > sliding_window:
        raise ValueError(
            f"sliding_window={sliding_window} is shorter than a document of {longest} tokens; "
            "set model.attention=sdpa"
        )
    groups = query.shape[1] // key.shape[1]
    query_T, key_T, value_T = (x[0].transpose(0, 1) for x in (query, key, value))
    output_T = torch.zeros_like(query_T)
    for bucket in buckets:
        q, k, v = (x[bucket.gather].transpose(1, 2) for x in (query_T, key_T, value_T))
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        part = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, dropout_p=dropout
        )
        part_N = part.transpose(1, 2).reshape(-1, *output_T.shape[1:])[bucket.valid]
        output_T = output_T.index_copy(0, bucket.gather.reshape(-1)[bucket.valid], part_N)
    return output_T[None], None


def register() -> None:
    """Makes `NAME` a valid attention implementation of transformers models."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, document_attention)


def choose(requested: Attention, *, device: str) -> str:
    """transformers' name for `model.attention`; `auto` takes the best there is.

    Raises AttentionError for what this device or installation can't train with.
    """
    from transformers.utils.import_utils import is_flash_attn_2_available

    if requested == Attention.documents:
        return NAME
    flash = device != "cpu" and is_flash_attn_2_available()
    if requested == Attention.auto:
        return "flash_attention_2" if flash else NAME
    if requested == Attention.flash_attention_2 and not flash:
        raise AttentionError(
            "model.attention=flash_attention_2 needs a GPU and the package flash-attn; install "
            "it, or set auto"
        )
    if requested == Attention.flex_attention and device == "cpu":
        raise AttentionError(
            "model.attention=flex_attention has no backward pass on CPU; set auto or documents"
        )
    return str(requested)
