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

NAME = "prorl_documents"
"""Name under which the attention is registered with transformers."""


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
    """[1, T] position of each token in its document."""


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
    return DocumentLayout(tuple(buckets), positions_T[None].to(device))


def document_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: DocumentLayout | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function in transformers' interface: [1, H, T, E] in, [1, T, H, E] out."""
    if layout is None:
        raise ValueError(f"{NAME} needs the document layout; pass layout= to the model")
    longest = max(bucket.gather.shape[1] for bucket in layout.buckets)
    if sliding_window is not None and longest > sliding_window:
        raise ValueError(
            f"sliding_window={sliding_window} is shorter than a document of {longest} tokens; "
            "set model.attention=sdpa"
        )
    groups = query.shape[1] // key.shape[1]
    query_T, key_T, value_T = (x[0].transpose(0, 1) for x in (query, key, value))
    output_T = torch.zeros_like(query_T)
    for bucket in layout.buckets:
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


def choose(requested: str, *, device: str) -> str:
    """Attention implementation for `model.attention`; `auto` takes the best there is."""
    if requested != "auto":
        return NAME if requested == "documents" else requested
    if device != "cpu":
        from transformers.utils.import_utils import is_flash_attn_2_available

        if is_flash_attn_2_available():
            return "flash_attention_2"
    return NAME
