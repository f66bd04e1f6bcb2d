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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from hpc.errors import HpcError
from hpc.files import aside, publish, replace_directory
from prorl_hpc.buffer.messages import GroupIds
from prorl_hpc.choices import ReferencePlacement
from prorl_hpc.learner.distributed import Ranks
from prorl_hpc.learner.filtering import EffectiveSamples
from prorl_hpc.learner.model import PolicyModel, copy_to_memory, reshard
from prorl_hpc.learner.reference import Reference, ReferenceIdentity
from prorl_hpc.learner.space import DiskError
from prorl_hpc.learner.tensors import load_tensors, save_tensors
from prorl_hpc.learner.together import on_all, on_first
from prorl_hpc.policy import hash_file, sync_tree
from prorl_hpc.run import Run

FORMAT = 1
"""Format number of a checkpoint."""

STATE = "learner.json"
MANIFEST = "manifest.json"
TENSORS = "tensors"
NAME = re.compile(r"step-(\d{8,})")
LEFT = re.compile(r"\.step-(\d{8,})\.[0-9a-f]+\.tmp")
"""What a writer calls a checkpoint while it writes or removes it."""
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
        name: copy_to_memory(tensor, ranks=ranks)
        for name, tensor in _tensors(model, optimizer, reference).items()
    }


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
    target = run.checkpoint(state.step)
    temporary = Path(ranks.broadcast(str(aside(target))))
    try:
        on_first(ranks, lambda: (temporary / TENSORS).mkdir(parents=True))
        save_tensors(tensors, temporary / TENSORS, ranks=ranks)
        on_first(ranks, lambda: _write(temporary / STATE, msgspec.json.encode(state)))
        files = _hash_together(temporary, ranks=ranks)
        on_first(ranks, lambda: _put_in_place(temporary, target, files=files))
    except OSError as err:
        raise DiskError.of(err, f"checkpoint of step {state.step} couldn't be written") from err
    finally:
        if ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _put_in_place(temporary: Path, target: Path, *, files: dict[str, str]) -> None:
    publish(temporary / MANIFEST, data=msgspec.json.encode(_Manifest(format=FORMAT, files=files)))
    sync_tree(temporary)
    replace_directory(temporary, target)


def load_newest(
    run: Run, *, ranks: Ranks, report: Callable[[str], None]
) -> tuple[Path, LearnerState] | None:
    """The newest whole checkpoint, or None. Damaged ones are reported, set aside and passed over.

    Raises CheckpointError for one of a newer format: going back silently would lose work.
    """
    on_first(ranks, lambda: sweep(run, report=report))
    for step in reversed(on_first(ranks, lambda: checkpoint_steps(run))):
        path = run.checkpoint(step)
        problem = _find_problem(path, ranks=ranks)
        if problem is None:
            return path, on_all(ranks, partial(read_state, path))
        on_first(ranks, partial(_set_damaged_aside, path, problem, report=report))
    return None


def _set_damaged_aside(path: Path, problem: str, *, report: Callable[[str], None]) -> None:
    report(f"checkpoint {path.name} is damaged ({problem}); using the one before it")
    path.rename(path.with_name(f".damaged-{path.name}.{secrets.token_hex(4)}"))


def sweep(run: Run, *, report: Callable[[str], None]) -> None:
    """Removes what writers that were killed have left of checkpoints, policies and exports.

    A whole checkpoint whose writer died between taking the old one's name away and giving it to
    the new one gets its name back.
    """
    halves = sorted(run.checkpoints.glob(".step-*.tmp"), key=_written, reverse=True)
    for half in halves:
        match = LEFT.fullmatch(half.name)
        target = run.checkpoint(int(match[1])) if match else None
        alone = Ranks(rank=0, world=1, device=torch.device("cpu"))
        if target is not None and not target.exists() and _find_problem(half, ranks=alone) is None:
            half.rename(target)
            report(f"checkpoint {target.name} has its name back; its writer was killed")
    left = [*halves, *run.policies.glob(".v*.tmp"), *run.exports.glob(".step-*.tmp")]
    for directory in left:
        shutil.rmtree(directory, ignore_errors=True)
    names = list(run.policies.glob(".latest.*.tmp"))
    for name in names:
        name.unlink(missing_ok=True)
    if left or names:
        number = len(left) + len(names)
        report(f"removed {number} unfinished files and directories of writers that were killed")


def _written(directory: Path) -> float:
    """When its manifest was written; 0 without one."""
    try:
        return (directory / MANIFEST).stat().st_mtime
    except OSError:
        return 0.0


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
    placement: ReferencePlacement = ReferencePlacement.device,
) -> Reference | None:
    """Fills model and optimizer from a checkpoint, for this number of ranks; returns its reference.

    The reference is verified against its identity. None when the checkpoint has none, or
    `with_reference` is false.
    """
    optimizer.state.clear()
    if state.has_moments:
        for _, parameter in model.named_weights():
            optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32)} | {
                moment: torch.zeros_like(parameter) for moment in MOMENTS
            }
    reference = None
    if state.reference is not None and with_reference:
        reference = Reference.blank(model, state.reference, ranks=ranks, placement=placement)
    load_tensors(_tensors(model, optimizer, reference), path / TENSORS, ranks=ranks)
    reshard(model)
    if state.rng:
        torch.set_rng_state(torch.tensor(list(base64.b64decode(state.rng)), dtype=torch.uint8))
    if reference is not None:
        reference.verify(ranks=ranks)
    return reference


def load_policy(path: Path, *, model: PolicyModel, ranks: Ranks) -> str | None:
    """Fills the model alone from a checkpoint (roll-back).

    What is wrong with the checkpoint, in words, when it is missing or damaged; then nothing is
    changed.
    """
    problem = _find_problem(path, ranks=ranks)
    if problem is not None:
        return problem
    tensors = {f"model/{name}": p.detach() for name, p in model.named_weights()}
    load_tensors(tensors, path / TENSORS, ranks=ranks)
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
    files = on_first(ranks, lambda: [path for path in directory.rglob("*") if path.is_file()])
    names = sorted(path.relative_to(directory).as_posix() for path in files)
    mine = names[ranks.rank :: ranks.world]
    part = on_all(ranks, lambda: {name: hash_file(directory / name) for name in mine})
    parts = ranks.gather(part)
    return dict(sorted((name, sha256) for part in parts for name, sha256 in part.items()))


def _find_problem(path: Path, *, ranks: Ranks) -> str | None:
    """What is wrong with a checkpoint, in words; the same answer on every rank."""

    def look() -> str | None:
        try:
            manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=_Manifest)
        except (OSError, msgspec.DecodeError) as err:
            return f"no readable {MANIFEST}: {err}"
        _check_format(manifest.format, path)
        mine = sorted(manifest.files)[ranks.rank :: ranks.world]
        wrong = [name for name in mine if not _matches(path / name, manifest.files[name])]
        return f"{wrong[0]} is missing or differs from its hash" if wrong else None

    return next((found for found in ranks.gather(on_all(ranks, look)) if found), None)


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


def _remove(target: Path) -> None:
    """Renamed first, so that nobody finds half of it under its name."""
    grave = aside(target)
    target.rename(grave)
    # Without its manifest it is rubbish for `sweep`, whenever this ends.
    (grave / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(grave, ignore_errors=True)
