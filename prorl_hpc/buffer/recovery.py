"""What a new attempt of the buffer finds on disk: takes ownership, checks shards, sweeps remains.

Knows files and the manifest; what the facts mean for groups is the dispatcher's business.
"""

import logging
import secrets
import socket
from contextlib import closing
from dataclasses import dataclass

from hpc.files import sync_directory
from prorl_hpc.buffer.digest import file_digest
from prorl_hpc.buffer.manifest import (
    FORMAT,
    Line,
    ManifestWriter,
    Owner,
    Quarantined,
    Shard,
    cut_torn_tail,
    live_shards,
    valid_lines,
)
from prorl_hpc.buffer.store import read_owner, take_ownership
from prorl_hpc.run import Run

log = logging.getLogger(__name__)

VERIFY_BYTES = 1 << 30
"""How much of the newest shards is hashed at start; of older ones the size is checked, and readers
hash every shard that they open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """The state on disk."""

    owner: Owner
    token: str
    lines: tuple[Line, ...]
    lost: tuple[Quarantined, ...]
    """Shards found damaged just now (also in `lines`); to be recorded."""
    shards: tuple[Shard, ...]
    """Those in force."""


def recover(run: Run, *, attempt: int) -> Recovered:
    """Takes the buffer over. Raises ManifestError for a manifest that can't be read."""
    run.shards.mkdir(parents=True, exist_ok=True)
    run.quarantine.mkdir(parents=True, exist_ok=True)
    mark = read_owner(run)
    generation = (mark.owner if mark is not None else 0) + 1
    token = secrets.token_hex(8)
    # First the mark: whatever the old owner writes after it, it won't acknowledge.
    take_ownership(run, owner=generation, token=token)
    cut_torn_tail(run.manifest)
    owner = Owner(owner=generation, format=FORMAT, attempt=attempt, host=socket.gethostname())
    # Then the line, before anything is read: what the old owner writes from here on doesn't count.
    with closing(ManifestWriter(run.manifest, owner=generation)) as manifest:
        manifest.append([owner])
    lines = list(valid_lines(run.manifest))
    shards = live_shards(lines)
    lost = tuple(
        Quarantined(number=number, reason=reason)
        for number, reason in _damaged(run, shards).items()
    )
    for line in lost:
        quarantine_file(run, line.number, reason=line.reason)
        shards.pop(line.number)
    _sweep(run, keep=set(shards))
    return Recovered(
        owner=owner,
        token=token,
        lines=(*lines, *lost),
        lost=lost,
        shards=tuple(shards.values()),
    )


def quarantine_file(run: Run, number: int, *, reason: str) -> None:
    """Moves a damaged shard out of the way, for people to look at."""
    log.error("shard %d is quarantined: %s; its trajectories are made again", number, reason)
    path = run.shard(number)
    if path.exists():
        run.quarantine.mkdir(parents=True, exist_ok=True)
        path.rename(run.quarantine / path.name)
        sync_directory(run.shards)


def _damaged(run: Run, shards: dict[int, Shard]) -> dict[int, str]:
    """Reason by number of each shard that isn't what was sealed."""
    reasons = {}
    budget = VERIFY_BYTES
    for number, line in sorted(shards.items(), reverse=True):
        path = run.shard(number)
        try:
            size = path.stat().st_size
            if size != line.num_bytes:
                reasons[number] = f"{path} has {size} bytes where {line.num_bytes} were sealed"
                continue
            if budget > 0:
                budget -= size
                with path.open("rb", buffering=0) as stream:
                    if file_digest(stream, like=line.checksum) != line.checksum:
                        reasons[number] = f"{path} differs from its digest in the manifest"
        except OSError as err:
            reasons[number] = f"{path}: {err.strerror}"
    return reasons


def _sweep(run: Run, *, keep: set[int]) -> None:
    """Removes shards that were never acknowledged, and temporary files."""
    names = {run.shard(number).name for number in keep}
    for path in run.shards.iterdir():
        if path.name not in names and path.suffix in (".h5", ".tmp"):
            path.unlink(missing_ok=True)
