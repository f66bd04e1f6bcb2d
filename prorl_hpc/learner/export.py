"""The policy of a checkpoint as a model directory. Knows a run's files; starts no training."""

from pathlib import Path

import torch

from prorl_hpc.learner.checkpoint import CheckpointError, checkpoint_steps, load_policy, read_state
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.model import build_policy, gather_adapter, gather_weights
from prorl_hpc.learner.publish import write_export
from prorl_hpc.recipe import load_recipe
from prorl_hpc.run import Run


def export_checkpoint(run: Run, step: int, target: Path) -> int:
    """Writes the policy of a step's checkpoint to `target`; returns the version it had.

    However many ranks wrote the checkpoint, one process on a CPU reads it. Raises CheckpointError
    for one that is missing or damaged, OSError when `target` can't be written.
    """
    if step not in checkpoint_steps(run):
        known = ", ".join(map(str, checkpoint_steps(run))) or "none yet"
        raise CheckpointError(f"step {step} of run {run.name!r} has no checkpoint; there: {known}")
    recipe = load_recipe(run.recipe)
    alone = Ranks(rank=0, world=1, device=torch.device("cpu"))
    model = build_policy(
        run.model_start,
        recipe.model,
        ranks=alone,
        chunk_tokens=recipe.learner.head_chunk_tokens,
    )
    problem = load_policy(run.checkpoint(step), model=model, ranks=alone)
    if problem is not None:
        raise CheckpointError(
            f"checkpoint of step {step} of run {run.name!r} is damaged: {problem}"
        )
    version = read_state(run.checkpoint(step)).version
    write_export(
        run,
        gather_weights(model, dtype=model.dtype, ranks=alone),
        version=version,
        step=step,
        target=target,
        adapter=gather_adapter(model, ranks=alone),
    )
    return version
