"""The policy's weights as a version that engines can load. Knows the run's layout; no training."""

import os
import shutil
from pathlib import Path

from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.model import PolicyModel, gather_weights
from prorl_hpc.learner.weights import INDEX, SINGLE, save_weights
from prorl_hpc.policy import MANIFEST, keep_newest, publish_directory, publish_policy
from prorl_hpc.run import Run


def publish_version(run: Run, *, model: PolicyModel, version: int, ranks: Ranks, keep: int) -> None:
    """Publishes the model as `version`, on all ranks together; rank 0 writes.

    Raises OSError on every rank when rank 0 can't write.
    """
    problem = _write(run, model=model, version=version, target=None, ranks=ranks)
    if problem is not None:
        raise OSError(f"policy version {version} couldn't be published: {problem}")
    if ranks.is_first:
        keep_newest(run, keep, protect={version})


def export(run: Run, *, model: PolicyModel, version: int, target: Path, ranks: Ranks) -> None:
    """Writes the model to a directory of its own, which no clean-up touches."""
    problem = _write(run, model=model, version=version, target=target, ranks=ranks)
    if problem is not None:
        raise OSError(f"model couldn't be exported to {target}: {problem}")


def publish_start(run: Run) -> None:
    """Publishes version 0 from the starting policy, sharing its files where links are possible."""

    def write(directory: Path) -> None:
        for source in run.model_start.iterdir():
            if source.name != MANIFEST and source.is_file():
                _link(source, directory / source.name)

    publish_policy(run, version=0, step=0, write=write)


def copy_companions(source: Path, directory: Path) -> None:
    """Copies configuration and tokenizer: everything of a model directory but weights."""
    for path in sorted(source.iterdir()):
        is_weight = path.suffix in (".safetensors", ".bin", ".gguf", ".pt") or path.name == INDEX
        if path.is_file() and not is_weight and path.name != MANIFEST:
            shutil.copyfile(path, directory / path.name)


def _write(
    run: Run, *, model: PolicyModel, version: int, target: Path | None, ranks: Ranks
) -> str | None:
    weights = gather_weights(model, dtype=model.dtype, ranks=ranks)
    problem = None

    def write(directory: Path) -> None:
        copy_companions(run.model_start, directory)
        save_weights(weights, directory)

    if ranks.is_first:
        try:
            if target is None:
                publish_policy(run, version=version, step=version, write=write)
            else:
                publish_directory(target, version=version, step=version, write=write)
        except OSError as err:
            problem = str(err)
    return ranks.broadcast(problem)


def _link(source: Path, target: Path) -> None:
    # Weights are never changed in place, so two names for one file are safe.
    if source.name.endswith(SINGLE.rsplit(".", 1)[1]):
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
    else:
        shutil.copyfile(source, target)
