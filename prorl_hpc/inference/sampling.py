"""Draws tokens from logits, and says with which log-probability. Knows no model and no request.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from prorl_hpc.inference.engine import Sampling


def draw(
    logits_BV: Tensor, samplings: Sequence[Sampling], randoms: Sequence[Random]
) -> tuple[list[int], list[float]]:
    """One token per row and its float32 log-probability under the distribution drawn from.

    The distribution is softmax(logits / temperature), cut by top_k and then top_p and normalised
    again. Temperature 0 takes the largest logit and reports it at temperature 1. A row uses one
    number of its own `Random`, so what it draws doesn't depend on its neighbours.
    """
    temperatures = [s.temperature if s.temperature > 0 else 1.0 for s in samplings]
    scale_B1 = torch.tensor(temperatures, device=logits_BV.device).unsqueeze(1)
    logprobs_BV = torch.log_softmax(logits_BV.float() / scale_B1, dim=-1)
    for row, sampling in enumerate(samplings):
        if sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1.0):
            logprobs_BV[row] = _cut(logprobs_BV[row], sampling)
    uniform = torch.tensor([random.random() for random in randoms], dtype=torch.float64)
    # float64: a float32 running sum over a large vocabulary loses the tail.
    cumulated_BV = logprobs_BV.double().exp().cumsum(dim=-1)
    target_B1 = uniform.to(logits_BV.device).unsqueeze(1) * cumulated_BV[:, -1:]
    drawn_B = torch.searchsorted(cumulated_BV, target_B1, right=True).squeeze(1)
    drawn_B = drawn_B.clamp(max=logits_BV.shape[1] - 1)
    greedy_B = torch.tensor([s.temperature == 0 for s in samplings], device=logits_BV.device)
    chosen_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), drawn_B)
    chosen_logprobs_B = logprobs_BV.gather(1, chosen_B.unsqueeze(1)).squeeze(1)
    return chosen_B.tolist(), chosen_logprobs_B.tolist()


def _cut(logprobs_V: Tensor, sampling: Sampling) -> Tensor:
    """Keeps the top_k likeliest, then the fewest that reach top_p; the rest becomes -inf."""
    ordered_V, order_V = logprobs_V.sort(descending=True, stable=True)
    keep_V = torch.ones_like(ordered_V, dtype=torch.bool)
    if sampling.top_k > 0:
        keep_V[sampling.top_k :] = False
    if sampling.top_p < 1.0:
        probabilities_V = ordered_V.masked_fill(~keep_V, -torch.inf).softmax(dim=-1)
        before_V = probabilities_V.cumsum(dim=-1) - probabilities_V
        keep_V &= before_V < sampling.top_p
        keep_V[0] = True
    kept_V = torch.full_like(logprobs_V, -torch.inf)
    kept_V[order_V[keep_V]] = ordered_V[keep_V]
    return torch.log_softmax(kept_V, dim=-1)
