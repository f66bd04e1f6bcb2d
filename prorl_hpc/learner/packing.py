"""Sequences to micro-batches of a token budget, balanced over ranks by work. Pure; no tensors.

The ranks of a sharded model move in step: each micro-batch costs what its slowest rank takes, and
a rank with fewer micro-batches than the others would leave them waiting for ever. So every rank
gets the same number (an empty micro-batch is a dummy: run one token through the model with an
all-false mask), and micro-batches of similar work run side by side. Deterministic: equal input,
equal plan.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from prorl_hpc.learner.algorithm_error import AlgorithmError


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPlan:
    """Which sequences each rank runs in each micro-batch, and how well they fill it."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """[rank][micro-batch] -> indices of the sequences, ascending; empty for a dummy."""
    token_efficiency: float
    """Tokens over the budget of the non-empty micro-batches; 1 when every one is full."""
    work_efficiency: float
    """Total work over what the ranks pay while they wait for the slowest; 1 when balanced."""
    num_dummies: int

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of every rank."""
        return len(self.micro_batches[0])


def sequence_work(length: int, *, hidden_size: int) -> float:
    """Work of one sequence in units of one token through the dense layers.

    A transformer layer has about 12 D^2 weights, 24 D^2 FLOPs per token; causal attention adds
    2 D x length on average, so a token costs 1 + length / (12 D) (Kaplan et al., arXiv
    2001.08361, section 2.1; Narayanan et al., arXiv 2104.04473, appendix).
    """
    return length * (1.0 + length / (12.0 * hidden_size))


def pack(
    lengths: Sequence[int], *, token_budget: int, num_ranks: int, hidden_size: int
) -> PackPlan:
    """Pack every sequence once; no micro-batch exceeds the budget; equal counts per rank.

    Raises `AlgorithmError` for a sequence longer than the budget, or a length below 0.
    """
    _check(lengths, token_budget=token_budget, num_ranks=num_ranks)
    work = [sequence_work(length, hidden_size=hidden_size) for length in lengths]
    tight = _best_fit(lengths, token_budget)
    rounds = max(1, math.ceil(len(tight) / num_ranks))
    bins = _balance(lengths, work, token_budget=token_budget, num_bins=rounds * num_ranks)
    if bins is None:
        bins = tight + [[] for _ in range(rounds * num_ranks - len(tight))]
    return _deal(bins, lengths, work, token_budget=token_budget, num_ranks=num_ranks)


def _check(lengths: Sequence[int], *, token_budget: int, num_ranks: int) -> None:
    if token_budget < 1 or num_ranks < 1:
        raise AlgorithmError(
            f"tokens_per_micro_batch={token_budget} and ranks={num_ranks} must be at least 1"
        )
    for index, length in enumerate(lengths):
        if not 0 <= length <= token_budget:
            raise AlgorithmError(
                f"sequence {index} has {length} tokens; tokens_per_micro_batch={token_budget} "
                "must hold the longest one: raise it, or lower the context"
            )


def _best_fit(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Best fit, longest first: each sequence goes where it leaves the least room."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(rooms, (lengths[index], -1))
        if place == len(rooms):
            bins.append([index])
            insort(rooms, (token_budget - lengths[index], len(bins) - 1))
        else:
            room, chosen = rooms.pop(place)
            bins[chosen].append(index)
            insort(rooms, (room - lengths[index], chosen))
    return bins


def _balance(
    lengths: Sequence[int], work: Sequence[float], *, token_budget: int, num_bins: int
) -> list[list[int]] | None:
    """Largest work first into the least loaded bin with room; None when the budget is too tight."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [token_budget] * num_bins
    heap = [(0.0, number) for number in range(num_bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-work[i], i)):
        full: list[tuple[float, int]] = []
        while heap and room[heap[0][1]] < lengths[index]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, chosen = heapq.heappop(heap)
        bins[chosen].append(index)
        room[chosen] -= lengths[index]
        heapq.heappush(heap, (load + work[index], chosen))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _deal(
    bins: list[list[int]],
    lengths: Sequence[int],
    work: Sequence[float],
    *,
    token_budget: int,
    num_ranks: int,
) -> PackPlan:
    """Bins of similar work side by side; the heavier of a round goes to the lighter rank."""
    loads = [sum(work[i] for i in chosen) for chosen in bins]
    order = sorted(range(len(bins)), key=lambda b: (-loads[b], b))
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    paid = 0.0
    for start in range(0, len(order), num_ranks):
        together = order[start : start + num_ranks]
        paid += num_ranks * loads[together[0]]
        lightest = sorted(range(num_ranks), key=lambda r: (totals[r], r))
        for rank, number in zip(lightest, together, strict=True):
            ranks[rank].append(tuple(sorted(bins[number])))
            totals[rank] += loads[number]
    num_full = sum(1 for chosen in bins if chosen)
    return PackPlan(
        micro_batches=tuple(tuple(batches) for batches in ranks),
        token_efficiency=sum(lengths) / (token_budget * num_full) if num_full else 1.0,
        work_efficiency=sum(loads) / paid if paid > 0 else 1.0,
        num_dummies=len(bins) - num_full,
    )
