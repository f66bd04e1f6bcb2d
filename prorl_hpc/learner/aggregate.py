"""Per-token losses to one number that doesn't depend on how the step was split. Pure.

The denominator is counted over the whole optimizer step (all ranks, all micro-batches) and passed
in, so the sum of the micro-batches' results is the step's loss: gradient accumulation, packing and
the number of ranks change nothing. Shapes: M tokens that count, T packed tokens, S sequences.
"""

import torch
from torch import Tensor

from prorl_hpc.choices import Aggregation
from prorl_hpc.learner.algorithm_error import AlgorithmError


def local_denominator(
    valid_T: Tensor,
    sequence_ids_T: Tensor,
    *,
    aggregation: Aggregation,
    constant_tokens: int | None = None,
) -> float:
    """This micro-batch's share of the denominator; sum it over micro-batches and ranks.

    Token mean (DAPO, arXiv 2503.14476, equation 12): valid tokens. Sequence mean (GRPO): sequences
    with at least one valid token. Constant (Dr.GRPO, arXiv 2503.20783): those sequences x
    `constant_tokens`, the same divisor for short and long responses.
    """
    valid_T = valid_T.bool()
    if aggregation is Aggregation.token_mean:
        return float(valid_T.sum())
    num_sequences = float(torch.unique(sequence_ids_T[valid_T]).numel())
    if aggregation is Aggregation.sequence_mean:
        return num_sequences
    if constant_tokens is None or constant_tokens < 1:
        raise AlgorithmError(
            f"algorithm.constant_tokens={constant_tokens} with aggregation=constant; "
            "set it to the longest response in tokens"
        )
    return num_sequences * constant_tokens


def aggregate(
    loss_M: Tensor,
    sequence_index_M: Tensor,
    *,
    aggregation: Aggregation,
    denominator: float,
    num_sequences: int,
) -> Tensor:
    """Sum of the losses over the step's denominator; a graph-connected 0 without tokens.

    `sequence_index_M` lies in 0..S-1. For the sequence mean, sequences must be whole here.
    """
    if not denominator > 0:
        if loss_M.numel():
            raise AlgorithmError(
                f"denominator={denominator} for {loss_M.numel()} tokens; pass the sum of "
                "loss_denominator over all micro-batches and ranks"
            )
        return loss_M.sum()
    if aggregation is Aggregation.sequence_mean:
        zeros_S = loss_M.new_zeros(num_sequences)
        count_S = zeros_S.index_add(0, sequence_index_M, torch.ones_like(loss_M))
        loss_M = loss_M / count_S[sequence_index_M]
    return loss_M.sum() / denominator
