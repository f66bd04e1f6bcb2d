"""Which context length and how many rollouts hold at a step. Pure; knows the recipe's stages.

ProRL trains at 8k, with 16 rollouts, then 32, and ends at 16k with 16 (arXiv 2505.24864). A stage
replaces what it names from its first step on; what it leaves out stays as it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prorl_hpc.learner.algorithm_error import AlgorithmError
from prorl_hpc.recipe import StageConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StageValues:
    """What holds at one step."""

    index: int
    """0 before the first stage begins, then 1, 2, ..."""
    context_tokens: int
    num_rollouts: int


def check_stages(stages: Sequence[StageConfig]) -> None:
    """Raises `AlgorithmError` unless the stages begin in ascending order with usable values."""
    previous = -1
    for number, stage in enumerate(stages):
        name = f"algorithm.stages[{number}]"
        if stage.from_step <= previous:
            raise AlgorithmError(
                f"{name}.from_step={stage.from_step} must be above {previous}; "
                "list the stages in the order they begin"
            )
        if stage.context_tokens is not None and stage.context_tokens < 1:
            raise AlgorithmError(f"{name}.context_tokens={stage.context_tokens} must be above 0")
        if stage.num_rollouts is not None and stage.num_rollouts < 2:
            raise AlgorithmError(
                f"{name}.num_rollouts={stage.num_rollouts} must be at least 2: a group of one "
                "has no advantage"
            )
        previous = stage.from_step


def stage_at(
    step: int, stages: Sequence[StageConfig], *, context_tokens: int, num_rollouts: int
) -> StageValues:
    """The values at this step, beginning from the recipe's own."""
    check_stages(stages)
    index = 0
    for stage in stages:
        if stage.from_step > step:
            break
        index += 1
        context_tokens = stage.context_tokens or context_tokens
        num_rollouts = stage.num_rollouts or num_rollouts
    return StageValues(index=index, context_tokens=context_tokens, num_rollouts=num_rollouts)


def next_boundary(step: int, stages: Sequence[StageConfig]) -> int | None:
    """First step after this one at which a stage begins; None when the last one holds."""
    return next((stage.from_step for stage in stages if stage.from_step > step), None)
