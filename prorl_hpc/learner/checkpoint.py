"""Checkpoints: everything a resumed learner needs. Knows files and tensors; no data, no loss.

    checkpoints/step-00000120/
      tensors/        model, optimizer and reference, sharded (torch.distributed.checkpoint)
      learner.json    `LearnerState`: counters, cursor, reset controller, reference identity, RNG
      manifest.json   sha256 of every file

A checkpoint is written beside its name and renamed once every rank is done and every byte is on
disk: a directory of that name is whole. Any number of ranks can read it.
"""

import base64
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from hpc.errors import HpcError
from hpc.files import publish, sync_directory
from prorl_hpc.buffer.messages import GroupIds
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.filtering import EffectiveSamples
from prorl_hpc.learner.model import PolicyModel, reshard
from prorl_hpc.learner.reference import Reference, ReferenceIdentity
from prorl_hpc.policy import hash_file, sync_tree
from prorl_hpc.run import Run

FORMAT = 1
"""Format number of a checkpoint."""

STATE = "learner.json"
MANIFEST = "manifest.json"
TENSORS = "tensors"
NAME = re.compile(r"step-(\d{8,})")
MOMENTS = ("exp_avg", "exp_avg_sq")


class CheckpointError(HpcError, ValueError):
    """A checkpoint that is damaged, or of a newer format."""


class LearnerState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds besides tensors."""

    step: int
    version: int
    consumed: GroupIds
    """Groups trained, filtered out or dropped as stale, up to this step."""
    filtered: int
    """How many of them gave no sample."""
    samples: EffectiveSamples
    reset: dict[str, Any]
    """The reset controller's state."""
    reference: ReferenceIdentity | None
    has_moments: bool
    """False before the first step and after a reset that cleared the optimizer."""
    last_kl: float | None = None
    """KL of the last step: the reset controller may still have to see it."""
    decided_step: int = -1
    """Step whose validation and reset decision are done."""
    roll_backs: int = 0
    """Roll-backs so far; each took a policy version beside those of the steps."""
    skipped_steps: int = 0
    """Steps so far that changed nothing (no usable group, or a gradient that wasn't finite)."""
    rng: str = ""
    """torch's CPU generator, base64."""
    world: int = 1
    format: int = FORMAT


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    files: dict[str, str]


def snapshot(
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    reference: Reference | None,
    *,
    ranks: Ranks,
) -> dict[str, Tensor]:
    """A copy of this rank's tensors in main memory, which training doesn't change any more."""
    return {
        name: _copy(tensor, ranks=ranks)
        for name, tensor in _tensors(model, optimizer, reference).items()
    }


def _copy(tensor: Tensor, *, ranks: Ranks) -> Tensor:
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    return DTensor.from_local(
        tensor.to_local().detach().to("cpu", copy=True),
        ranks.memory,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def save_checkpoint(
    run: Run,
    state: LearnerState,
    *,
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    reference: Reference | None,
    ranks: Ranks,
) -> Path:
    """Writes the checkpoint of `state.step` as the tensors are now; see `write_checkpoint`."""
    return write_checkpoint(run, state, _tensors(model, optimizer, reference), ranks=ranks)


def write_checkpoint(
    run: Run, state: LearnerState, tensors: dict[str, Tensor], *, ranks: Ranks
) -> Path:
    """Writes the checkpoint of `state.step`, on all ranks together; returns its directory.

    Raises OSError (disk full, ...) on every rank, with the name untouched.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    target = run.checkpoint(state.step)
    temporary = Path(ranks.broadcast(str(_aside(target))))
    _on_first(ranks, lambda: (temporary / TENSORS).mkdir(parents=True))
    try:
        with _alone_is_fine():
            save(
                tensors,
                checkpoint_id=temporary / TENSORS,
                process_group=ranks.control,
                no_dist=ranks.world == 1,
            )
        _on_first(ranks, lambda: _write(temporary / STATE, msgspec.json.encode(state)))
        files = _hash_together(temporary, ranks=ranks)
        _on_first(ranks, lambda: _put_in_place(temporary, target, files=files))
    except CheckpointException as err:
        first = next(iter(err.failures.values()))[0]
        raise OSError(f"checkpoint of step {state.step} couldn't be written: {first}") from err
    finally:
        if ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def _on_first(ranks: Ranks, body: Callable[[], None]) -> None:
    """Rank 0 does it; when it can't, every rank raises OSError."""
    problem: str | None = None
    if ranks.is_first:
        try:
            body()
        except OSError as err:
            if ranks.world == 1:
                raise
            problem = str(err)
    problem = ranks.broadcast(problem)
    if problem is not None:
        raise OSError(f"rank 0: {problem}")


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _put_in_place(temporary: Path, target: Path, *, files: dict[str, str]) -> None:
    publish(temporary / MANIFEST, data=msgspec.json.encode(_Manifest(format=FORMAT, files=files)))
    sync_tree(temporary)
    # The old one is only removed, which may take long, once the new one has its name.
    grave = _set_aside(target)
    temporary.rename(target)
    sync_directory(target.parent)
    if grave is not None:
        shutil.rmtree(grave, ignore_errors=True)


def load_newest(
    run: Run, *, ranks: Ranks, report: Callable[[str], None]
) -> tuple[Path, LearnerState] | None:
    """The newest whole checkpoint, or None. Damaged ones are reported, set aside and passed over.

    Raises CheckpointError for one of a newer format: going back silently would lose work.
    """
    for step in reversed(ranks.broadcast(checkpoint_steps(run))):
        path = run.checkpoint(step)
        problem = _find_problem(path, ranks=ranks)
        if problem is None:
            return path, read_state(path)
        if ranks.is_first:
            report(f"checkpoint {path.name} is damaged ({problem}); using the one before it")
            path.rename(path.with_name(f".damaged-{path.name}.{secrets.token_hex(4)}"))
        ranks.barrier()
    return None


def read_state(path: Path) -> LearnerState:
    """`learner.json` of a checkpoint; raises CheckpointError."""
    try:
        state = msgspec.json.decode((path / STATE).read_bytes(), type=LearnerState)
    except (OSError, msgspec.DecodeError) as err:
        raise CheckpointError(f"checkpoint {path}: {STATE} can't be read: {err}") from err
    _check_format(state.format, path)
    return state


def restore(
    path: Path,
    state: LearnerState,
    *,
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    with_reference: bool,
    ranks: Ranks,
) -> Reference | None:
    """Fills model and optimizer from a checkpoint, for this number of ranks; returns its reference.

    The reference is verified against its identity. None when the checkpoint has none, or
    `with_reference` is false.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    optimizer.state.clear()
    if state.has_moments:
        for _, parameter in model.named_weights():
            optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32)} | {
                moment: torch.zeros_like(parameter) for moment in MOMENTS
            }
    reference = None
    if state.reference is not None and with_reference:
        empty = {name: torch.zeros_like(p.detach()) for name, p in model.named_weights()}
        reference = Reference(empty, state.reference)
    with torch.no_grad(), _alone_is_fine():
        load(
            _tensors(model, optimizer, reference),
            checkpoint_id=path / TENSORS,
            process_group=ranks.control,
            no_dist=ranks.world == 1,
        )
    reshard(model)
    if state.rng:
        torch.set_rng_state(torch.tensor(list(base64.b64decode(state.rng)), dtype=torch.uint8))
    if reference is not None:
        reference.verify(ranks=ranks)
    return reference


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """A single rank has no process group, and torch warns of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        yield


def load_policy(path: Path, *, model: PolicyModel, ranks: Ranks) -> str | None:
    """Fills the model alone from a checkpoint (roll-back).

    What is wrong with the checkpoint, in words, when it is missing or damaged; then nothing is
    changed.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    problem = _find_problem(path, ranks=ranks)
    if problem is not None:
        return problem
    tensors = {f"model/{name}": p.detach() for name, p in model.named_weights()}
    with torch.no_grad(), _alone_is_fine():
        load(
            tensors,
            checkpoint_id=path / TENSORS,
            process_group=ranks.control,
            no_dist=ranks.world == 1,
        )
    reshard(model)
    return None


def rng_text() -> str:
    """The state of torch's CPU generator, for `LearnerState.rng`."""
    return base64.b64encode(bytes(torch.get_rng_state().tolist())).decode()


def checkpoint_steps(run: Run) -> list[int]:
    """Steps that have a checkpoint, in ascending order."""
    if not run.checkpoints.is_dir():
        return []
    matches = (NAME.fullmatch(entry.name) for entry in run.checkpoints.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def keep_last(run: Run, n: int, *, protect: tuple[int | None, ...] = ()) -> list[int]:
    """Removes all but the last `n` checkpoints and the protected steps; returns what it removed."""
    steps = checkpoint_steps(run)
    doomed = [step for step in steps[: max(len(steps) - n, 0)] if step not in protect]
    for step in doomed:
        _remove(run.checkpoint(step))
    return doomed


def _tensors(
    model: PolicyModel, optimizer: torch.optim.Optimizer, reference: Reference | None
) -> dict[str, Tensor]:
    """Every tensor under one flat name; views of the live ones, so that loading fills them."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_weights():
        tensors[f"model/{name}"] = parameter.detach()
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{moment}/{name}"] = value
        if reference is not None:
            tensors[f"reference/{name}"] = reference.tensors[name]
    return tensors


def _hash_together(directory: Path, *, ranks: Ranks) -> dict[str, str]:
    """sha256 of every file below `directory`; each rank hashes its share."""
    names = sorted(
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )
    mine = ranks.broadcast(names)[ranks.rank :: ranks.world]
    parts = ranks.gather({name: hash_file(directory / name) for name in mine})
    return dict(sorted((name, sha256) for part in parts for name, sha256 in part.items()))


def _find_problem(path: Path, *, ranks: Ranks) -> str | None:
    """What is wrong with a checkpoint, in words; the same answer on every rank."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=_Manifest)
    except (OSError, msgspec.DecodeError) as err:
        problem: str | None = f"no readable {MANIFEST}: {err}"
    else:
        _check_format(manifest.format, path)
        mine = sorted(manifest.files)[ranks.rank :: ranks.world]
        wrong = [name for name in mine if not _matches(path / name, manifest.files[name])]
        problem = f"{wrong[0]} is missing or differs from its hash" if wrong else None
    return next((found for found in ranks.gather(problem) if found), None)


def _matches(path: Path, sha256: str) -> bool:
    try:
        return hash_file(path) == sha256
    except OSError:
        return False


def _check_format(number: int, path: Path) -> None:
    if number > FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {number}, newer than {FORMAT}; update prorl-hpc"
        )


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")


def _set_aside(target: Path) -> Path | None:
    if not target.exists():
        return None
    grave = _aside(target)
    target.rename(grave)
    return grave


def _remove(target: Path) -> None:
    grave = _set_aside(target)
    if grave is not None:
        shutil.rmtree(grave, ignore_errors=True)
