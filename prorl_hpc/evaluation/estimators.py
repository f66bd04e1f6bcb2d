"""Estimators of evaluation: pass@k, bootstrap intervals, blended score. Pure; knows no tasks.

Shapes: P problems.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpc.errors import UserError


class EvaluationError(UserError, ValueError):
    """Numbers that can't be evaluated; the message names them and the remedy."""


def pass_at_k(num_samples: int, num_correct: int, *, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): unbiased chance that one of k samples is correct.

    "Evaluating large language models trained on code", arXiv 2107.03374, equation 1, as a
    product so that nothing overflows.
    """
    if not 0 <= num_correct <= num_samples:
        raise EvaluationError(f"{num_correct} correct of {num_samples} samples is impossible")
    if not 1 <= k <= num_samples:
        raise EvaluationError(
            f"pass@{k} needs at least {k} samples per problem, there are {num_samples}; "
            "raise the number of samples or lower k"
        )
    if num_samples - num_correct < k:
        return 1.0
    failures = range(num_samples - num_correct + 1, num_samples + 1)
    return 1.0 - math.prod(1.0 - k / n for n in failures)


class Interval(NamedTuple):
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float


def bootstrap_interval(
    values_P: Sequence[float] | NDArray[np.float64],
    *,
    seed: int,
    confidence: float = 0.95,
    num_resamples: int = 2000,
) -> Interval:
    """Percentile bootstrap of the mean over problems (Efron 1979); equal seeds, equal interval.

    Resample problems, not samples: the samples of one problem are not independent draws of what
    the evaluation is about.
    """
    values = np.asarray(values_P, dtype=np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise EvaluationError(
            f"bootstrap of values with shape {values.shape}; give at least one finite number "
            "per problem"
        )
    if not 0 < confidence < 1 or num_resamples < 1:
        raise EvaluationError(
            f"confidence={confidence} must lie in (0, 1) and num_resamples={num_resamples} "
            "must be positive"
        )
    rng = np.random.default_rng(seed)
    # Counts of a resample are multinomial: P numbers per resample instead of P draws.
    counts = rng.multinomial(values.size, np.full(values.size, 1.0 / values.size), num_resamples)
    means = counts @ values / values.size
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, (tail, 1.0 - tail))
    return Interval(float(values.mean()), float(low), float(high))


def blended_score(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Weighted mean of the tasks' scores, over the tasks with a positive weight.

    Every such task must have a finite score: a blend over fewer tasks than the last one would
    move without any change of the policy. Raises `EvaluationError` otherwise.
    """
    weighted = {task: weight for task, weight in weights.items() if weight > 0}
    if not weighted or any(not math.isfinite(weight) for weight in weighted.values()):
        raise EvaluationError(
            f"validation weights {dict(weights)} have no positive finite entry; "
            "set tasks.<name>.validation_weight"
        )
    missing = sorted(task for task in weighted if not math.isfinite(scores.get(task, math.nan)))
    if missing:
        raise EvaluationError(
            f"no finite validation score for {', '.join(missing)}; give it weight 0, or validate it"
        )
    total = sum(weighted.values())
    return sum(weight * scores[task] for task, weight in weighted.items()) / total
