"""A running batch of one transformers model: rows join and leave between steps.

Knows the model and its key/value cache; knows no threads and no files. Rows are padded on the
left, so that the newest tokens line up. A row's cache covers all its tokens but the last, which is
the input of the next step.

Shapes: B rows, T cached positions, V vocabulary.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from prorl_hpc.inference.engine import Sampling
from prorl_hpc.inference.sampling import draw

PREFILL_TOKENS = 16384
"""Padded tokens of one prefill pass: bounds the memory of activations."""


@dataclass(kw_only=True, slots=True, eq=False)
class Row:
    """One request while it runs."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    random: Random
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def finish_reason(self) -> str | None:
        """None while it runs."""
        if self.token_ids and self.token_ids[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.sampling.max_new_tokens else None

    def take(self, token: int, logprob: float, version: int) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)


class RunningBatch:
    """The rows that decode together."""

    def __init__(self, model: Any, *, version: int) -> None:
        self.model = model
        self.version = version
        self.rows: list[Row] = []
        self._cache: Any = None
        self._mask_BT = torch.zeros((0, 0), dtype=torch.long)

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @torch.inference_mode()
    def join(self, rows: list[Row]) -> None:
        """Runs the prompts of new rows and draws the first token of each."""
        for part in _parts(rows):
            cache, mask_BT, logits_BV = self._prefill([row.prompt_ids for row in part])
            self._append(part, cache, mask_BT)
            self._draw(part, logits_BV)

    @torch.inference_mode()
    def step(self) -> None:
        """Draws the next token of every row."""
        last_B1 = torch.tensor([[row.token_ids[-1]] for row in self.rows], device=self.device)
        ones_B1 = torch.ones((len(self.rows), 1), dtype=torch.long, device=self.device)
        self._mask_BT = torch.cat([self._mask_BT, ones_B1], dim=1)
        positions_B1 = self._mask_BT.sum(dim=1, keepdim=True) - 1
        logits_BV = self._forward(last_B1, self._mask_BT, positions_B1, self._cache)
        self._draw(self.rows, logits_BV)

    @torch.inference_mode()
    def leave(self, gone: list[Row]) -> None:
        """Drops rows, and the padding that nobody needs any more."""
        if not gone:
            return
        keep = [i for i, row in enumerate(self.rows) if row not in gone]
        self.rows = [self.rows[i] for i in keep]
        if not keep or self._cache is None:
            self.clear()
            return
        index = torch.tensor(keep, device=self.device)
        mask_BT = self._mask_BT[index]
        start = int(mask_BT.any(dim=0).int().argmax())
        self._mask_BT = mask_BT[:, start:]
        for layer in self._cache.layers:
            layer.keys = layer.keys[index, :, start:]
            layer.values = layer.values[index, :, start:]

    @torch.inference_mode()
    def rebuild(self) -> None:
        """Computes the cache again, after the weights changed: no token sees stale keys."""
        rows, self.rows, self._cache = self.rows, [], None
        for part in _parts(rows):
            known = [(*row.prompt_ids, *row.token_ids)[:-1] for row in part]
            cache, mask_BT, _ = self._prefill(known)
            self._append(part, cache, mask_BT)

    def clear(self) -> None:
        self.rows, self._cache = [], None
        self._mask_BT = torch.zeros((0, 0), dtype=torch.long, device=self.device)

    def _prefill(self, sequences: list[tuple[int, ...]]) -> tuple[Any, Tensor, Tensor]:
        """Cache, mask and last logits. Equal sequences (rollouts of a group) are computed once."""
        unique = list(dict.fromkeys(sequences))
        width = max(len(ids) for ids in unique)
        ids_BT = torch.tensor([[0] * (width - len(s)) + list(s) for s in unique])
        mask_BT = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in unique])
        ids_BT, mask_BT = ids_BT.to(self.device), mask_BT.to(self.device)
        positions_BT = (mask_BT.cumsum(dim=1) - 1).clamp(min=0)
        cache: Any = DynamicCache()
        logits_BV = self._forward(ids_BT, mask_BT, positions_BT, cache)
        if len(unique) == len(sequences):
            return cache, mask_BT, logits_BV
        place = {ids: i for i, ids in enumerate(unique)}
        index = torch.tensor([place[ids] for ids in sequences], device=self.device)
        cache.batch_select_indices(index)
        return cache, mask_BT[index], logits_BV[index]

    def _forward(self, ids_BT: Tensor, mask_BT: Tensor, positions_BT: Tensor, cache: Any) -> Tensor:
        out = self.model(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            position_ids=positions_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_BV: Tensor = out.logits[:, -1]
        return logits_BV

    def _append(self, rows: list[Row], cache: Any, mask_BT: Tensor) -> None:
        self.rows = self.rows + rows
        if self._cache is None:
            self._cache, self._mask_BT = cache, mask_BT
            return
        width = max(self._mask_BT.shape[1], mask_BT.shape[1])
        self._mask_BT = torch.cat([_widen(self._mask_BT, width, 1), _widen(mask_BT, width, 1)])
        for ours, theirs in zip(self._cache.layers, cache.layers, strict=True):
            ours.keys = torch.cat([_widen(ours.keys, width, 2), _widen(theirs.keys, width, 2)])
            ours.values = torch.cat(
                [_widen(ours.values, width, 2), _widen(theirs.values, width, 2)]
            )

    def _draw(self, rows: list[Row], logits_BV: Tensor) -> None:
        tokens, logprobs = draw(logits_BV, [r.sampling for r in rows], [r.random for r in rows])
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            row.take(token, logprob, self.version)


def _widen(tensor: Tensor, width: int, dim: int) -> Tensor:
    """Zeros on the left of dimension `dim`, up to `width`."""
    missing = width - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], dim=dim)


def _parts(rows: list[Row]) -> list[list[Row]]:
    """Splits rows so that one padded prefill stays within PREFILL_TOKENS."""
    parts: list[list[Row]] = []
    width = 0
    for row in rows:
        length = len(row.prompt_ids) + len(row.token_ids)
        width = max(width, length)
        if parts and width * (len(parts[-1]) + 1) <= PREFILL_TOKENS:
            parts[-1].append(row)
        else:
            parts.append([row])
            width = length
    return parts
