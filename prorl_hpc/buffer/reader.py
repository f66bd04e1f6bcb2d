"""Closed groups straight from the sealed shards. Opens what the manifest names; writes nothing.

Used by the learner on the shared file system, and by the export and the viewers.
"""

from collections import OrderedDict

from prorl_hpc.buffer.manifest import ManifestTail
from prorl_hpc.buffer.messages import GroupRef
from prorl_hpc.buffer.shard import OpenShard, ShardDamaged
from prorl_hpc.records import Group, Trajectory
from prorl_hpc.run import Run

MAX_OPEN_SHARDS = 32


class GroupReader:
    """Reads groups; keeps the last shards open. One thread."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tail = ManifestTail(run.manifest)
        self._open: OrderedDict[int, OpenShard] = OrderedDict()

    def read(self, ref: GroupRef) -> Group:
        """The group's usable trajectories. Raises ShardDamaged (with `.shard`), ManifestError."""
        trajectories = tuple(self._trajectory(shard, row) for shard, row in ref.members)
        return Group(
            group_id=ref.group_id,
            kind=ref.kind,
            task=ref.task,
            # A group that was finished over a restart has its name in the trajectories alone.
            instance_id=ref.instance_id or next((t.instance_id for t in trajectories), ""),
            trajectories=trajectories,
        )

    def close(self) -> None:
        """Closes the files."""
        while self._open:
            self._open.popitem()[1].close()

    def _trajectory(self, shard: int, row: int) -> Trajectory:
        while True:
            number, at = self._tail.moves.place(shard, row)
            try:
                return self._shard(number).read(at)
            except ShardDamaged:
                # Small shards are merged at any time; the file may just have gone for that.
                self._tail.refresh()
                if self._tail.moves.place(shard, row) == (number, at):
                    raise

    def _shard(self, number: int) -> OpenShard:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        line = self._tail.shard(number)
        if line is None:
            raise ShardDamaged(
                f"shard {number} is not in {self._run.manifest} (or was quarantined)", shard=number
            )
        shard = OpenShard(self._run.shard(number), number=number, digest=line.checksum)
        self._open[number] = shard
        while len(self._open) > MAX_OPEN_SHARDS:
            self._open.popitem(last=False)[1].close()
        return shard
