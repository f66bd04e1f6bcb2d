"""The policy's weights as a version that engines can load. Knows the run's layout; no training."""

import os
import shutil
from pathlib import Path

from torch import Tensor

from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.lora import DIRECTORY as ADAPTER_DIRECTORY
from prorl_hpc.learner.lora import Adapter
from prorl_hpc.learner.model import PolicyModel, gather_adapter, gather_weights
from prorl_hpc.learner.space import DiskError
from prorl_hpc.learner.together import on_first
from prorl_hpc.learner.weights import INDEX, SINGLE, save_weights
from prorl_hpc.policy import MANIFEST, keep_newest, publish_directory, publish_policy
from prorl_hpc.run import Run


def publish_version(
    run: Run, *, model: PolicyModel, version: int, ranks: Ranks, keep: int, step: int | None = None
) -> None:
    """Publishes the model as `version`, on all ranks together; rank 0 writes.

    Raises on every rank what keeps rank 0 from writing.
    """
    weights = gather_weights(model, dtype=model.dtype, ranks=ranks)
    adapter = gather_adapter(model, ranks=ranks)
    on_first(
        ranks,
        lambda: write_version(run, weights, version=version, step=step, keep=keep, adapter=adapter),
    )


def write_version(
    run: Run,
    weights: dict[str, Tensor],
    *,
    version: int,
    keep: int,
    step: int | None = None,
    adapter: Adapter | None = None,
) -> None:
    """Publishes gathered weights as `version` of `step` (the version's number unless given).

    Removes all but the newest `keep` versions. Raises OSError.
    """
    try:
        publish_policy(
            run,
            version=version,
            step=version if step is None else step,
            write=lambda directory: _fill(run, weights, adapter, directory),
        )
    except OSError as err:
        raise DiskError.of(err, f"policy version {version} couldn't be published") from err
    keep_newest(run, keep, protect={version})


def write_export(
    run: Run,
    weights: dict[str, Tensor],
    *,
    version: int,
    step: int,
    target: Path,
    adapter: Adapter | None = None,
) -> None:
    """Writes gathered weights to a directory that no clean-up touches. Raises OSError."""
    try:
        publish_directory(
            target,
            version=version,
            step=step,
            write=lambda directory: _fill(run, weights, adapter, directory),
        )
    except OSError as err:
        raise DiskError.of(err, f"model couldn't be exported to {target}") from err


def _fill(run: Run, weights: dict[str, Tensor], adapter: Adapter | None, directory: Path) -> None:
    copy_companions(run.model_start, directory)
    save_weights(weights, directory)
    if adapter is not None:
        # Below, so that what loads the merged model doesn't take it for a part of it.
        adapter.write(directory / ADAPTER_DIRECTORY, base=run.model_start)


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


def _link(source: Path, target: Path) -> None:
    # Weights are never changed in place, so two names for one file are safe.
    if source.name.endswith(SINGLE.rsplit(".", 1)[1]):
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
    else:
        shutil.copyfile(source, target)
