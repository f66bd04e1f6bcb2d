"""Many small shards to one larger one, so that long runs keep within inode quotas.

Which ones are to be merged is decided here, in tiers of size, so that a byte is rewritten a few
times and not once per merge; and the merged shard is made. When it counts is the store's business.
"""

from collections.abc import Sequence
from contextlib import closing

from prorl_hpc.buffer.image import shard_image, write_shard
from prorl_hpc.buffer.manifest import Merged, Shard
from prorl_hpc.buffer.shard import OpenShard
from prorl_hpc.run import Run

FAN_IN = 16
"""So many shards of one tier are merged; at most about so many of each tier remain."""
TIER_BITS = 4
"""Sizes of one tier differ by less than a factor of 2**4."""
MAX_ROWS = 2048
"""Bounds the time that one merge takes from the writing of new trajectories."""


class SmallShards:
    """The shards that are worth merging."""

    def __init__(self, *, shard_bytes: int) -> None:
        self._shard_bytes = shard_bytes
        self._shards: dict[int, Shard] = {}

    def add(self, line: Shard) -> None:
        """A shard is durable; a large one is left as it is."""
        if line.num_bytes < self._shard_bytes // 2 and len(line.rows) < MAX_ROWS // 2:
            self._shards[line.number] = line

    def remove(self, number: int) -> None:
        self._shards.pop(number, None)

    def choose(self, *, backlog: int = 1) -> list[Shard]:
        """The oldest of a tier that has `backlog` times the fan-in; none: nothing to do."""
        tiers: dict[int, list[Shard]] = {}
        for _, line in sorted(self._shards.items()):
            tiers.setdefault(line.num_bytes.bit_length() // TIER_BITS, []).append(line)
        for _, lines in sorted(tiers.items()):
            if len(lines) >= FAN_IN * backlog:
                return self._bounded(lines)
        return []

    def _bounded(self, lines: Sequence[Shard]) -> list[Shard]:
        chosen: list[Shard] = []
        size = rows = 0
        for line in lines:
            size, rows = size + line.num_bytes, rows + len(line.rows)
            if len(chosen) >= 2 and (size > self._shard_bytes or rows > MAX_ROWS):
                break
            chosen.append(line)
        return chosen


def merge(run: Run, sources: Sequence[Shard], *, number: int) -> Merged:
    """Writes shard `number` with the rows of all sources, durably; the line that makes it count.

    Raises ShardDamaged for a source, and OSError with nothing left behind.
    """
    parcels = []
    for line in sources:
        with closing(
            OpenShard(run.shard(line.number), number=line.number, digest=line.checksum)
        ) as s:
            parcels += [s.parcel(row) for row in range(len(line.rows))]
    image = shard_image(parcels)
    path = run.shard(number)
    path.unlink(missing_ok=True)  # the remains of a failed try
    digest = write_shard(path, image=image)
    first, starts = 0, []
    for line in sources:
        starts.append((line.number, first))
        first += len(line.rows)
    return Merged(
        number=number,
        digest=digest,
        num_bytes=image.num_bytes,
        rows=tuple(row for line in sources for row in line.rows),
        sources=tuple(starts),
    )
