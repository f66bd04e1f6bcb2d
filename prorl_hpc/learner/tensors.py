"""Sharded tensors to files and back (torch.distributed.checkpoint). Knows no training.

What goes wrong on one rank is raised on all of them, as an OSError that keeps its number.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.space import DiskError


def save_tensors(tensors: dict[str, Tensor], directory: Path, *, ranks: Ranks) -> None:
    """Writes this rank's part of the tensors. Raises OSError on every rank."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with _one_rank_is_fine(), _as_os_error():
        save(
            tensors,
            storage_writer=_Writer(directory),
            process_group=ranks.control,
            no_dist=ranks.world == 1,
        )


def load_tensors(tensors: dict[str, Tensor], directory: Path, *, ranks: Ranks) -> None:
    """Fills the tensors, whichever ranks have written them. Raises OSError on every rank."""
    from torch.distributed.checkpoint.state_dict_loader import load

    with torch.no_grad(), _one_rank_is_fine(), _as_os_error():
        load(
            tensors,
            checkpoint_id=directory,
            process_group=ranks.control,
            no_dist=ranks.world == 1,
        )


class _Writer(FileSystemWriter):
    """A full disk stays one on its way to the other ranks, which get errors without their cause."""

    def write_data(self, *args: Any, **settings: Any) -> Any:
        try:
            return super().write_data(*args, **settings)
        except Exception as err:
            raise DiskError.of(err, "tensors") from err


@contextmanager
def _as_os_error() -> Iterator[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as err:
        rank, (first, _) = next(iter(err.failures.items()))
        raise DiskError.of(first, f"rank {rank}") from err


@contextmanager
def _one_rank_is_fine() -> Iterator[None]:
    """A single rank has no process group, and torch warns of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        yield
