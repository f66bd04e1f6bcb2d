"""Makes trajectories and manifest lines durable: one writer thread, many trajectories per fsync.

Knows files and threads; decides nothing about groups. A full disk pauses it: nothing is reported
durable, and the same bytes are tried again until there is space.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpc.files import publish, sync_directory
from prorl_hpc.buffer.compact import SmallShards, merge
from prorl_hpc.buffer.groups import Location
from prorl_hpc.buffer.image import ShardImage, shard_image, write_shard
from prorl_hpc.buffer.manifest import Line, ManifestWriter, Owner, Shard, Superseded
from prorl_hpc.buffer.parcel import Parcel
from prorl_hpc.buffer.shard import ShardDamaged
from prorl_hpc.run import Run

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
MERGE_RETRY_SECONDS = 60.0
HURRY = 4
"""While trajectories wait, small shards are merged when so many times the usual has gathered."""
SHARDS_PER_OWNER = 1_000_000
"""Shard numbers of different attempts never meet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed:
    """What has become durable together."""

    trajectories: tuple[tuple[Parcel, Location], ...]
    lines: tuple[Line, ...]


class OwnerMark(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file that says which attempt owns the buffer."""

    owner: int
    token: str


class Store:
    """The writer thread and its queue."""

    def __init__(
        self,
        run: Run,
        *,
        owner: Owner,
        token: str,
        shard_bytes: int,
        seal_seconds: float,
        wake: Callable[[], None],
    ) -> None:
        self._run = run
        self._mark = OwnerMark(owner=owner.owner, token=token)
        self._next_shard = owner.owner * SHARDS_PER_OWNER
        self._shard_bytes = shard_bytes
        self._seal_seconds = seal_seconds
        self._wake = wake
        self._changed = threading.Condition()
        self._trajectories: deque[Parcel] = deque()
        self._lines: list[Line] = []
        self._small = SmallShards(shard_bytes=shard_bytes)
        self._merge_after = 0.0
        self._oldest = 0.0
        self._queued_bytes = 0
        self._sealed: list[Sealed] = []
        self._writing = False
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="buffer-store", daemon=True)
        self.pending_bytes = 0
        """Bytes of arrays that were taken and aren't durable yet."""
        self.stored_bytes = 0
        self.num_shards = 0
        self.paused = ""
        """Why nothing is written just now; empty when all is well."""
        self.failure: BaseException | None = None
        """What ended the thread before its time."""

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def restore(self, shards: Iterable[Shard]) -> None:
        """What is there already. Call before `start`."""
        for line in shards:
            self._count(line, 1)
            self._small.add(line)

    def submit(self, trajectories: Sequence[Parcel]) -> None:
        """Queues trajectories; they come back through `sealed`."""
        size = sum(t.num_bytes for t in trajectories)
        with self._changed:
            if not self._trajectories:
                self._oldest = time.monotonic()
            self._trajectories.extend(trajectories)
            self._queued_bytes += size
            self.pending_bytes += size
            self._changed.notify()

    def record(self, lines: Sequence[Line]) -> None:
        """Queues manifest lines; they come back through `sealed`."""
        if lines:
            with self._changed:
                self._lines.extend(lines)
                self._changed.notify()

    def sealed(self) -> list[Sealed]:
        """What has become durable since the last call."""
        with self._changed:
            done, self._sealed = self._sealed, []
        return done

    @property
    def idle(self) -> bool:
        """Nothing waits to be written or collected."""
        with self._changed:
            return not (self._trajectories or self._lines or self._sealed or self._writing)

    def stop(self, *, timeout_seconds: float) -> bool:
        """Writes what is queued and ends the thread; whether it got that far in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout=timeout_seconds)
        return not self._thread.is_alive() and self.failure is None

    def _work(self) -> None:
        try:
            manifest = ManifestWriter(self._run.manifest, owner=self._mark.owner)
            with contextlib.closing(manifest):
                while (work := self._next()) is not None:
                    self._persist(manifest, *work)
                    self._compact(manifest)
        except BaseException as err:
            self.failure = err
        self._wake()

    def _next(self) -> tuple[list[Parcel], list[Line]] | None:
        """One shard's trajectories and the lines so far; None when it is time to end.

        Neither may be there when small shards are to be merged.
        """
        with self._changed:
            self._writing = False
            while not self._lines and not self._due() and not self._mergeable():
                if self._stopping and not self._trajectories:
                    return None
                self._changed.wait(timeout=0.01 if self._trajectories else 1.0)
            batch, size = [], 0
            if self._due():
                while self._trajectories and size < self._shard_bytes:
                    batch.append(self._trajectories.popleft())
                    size += batch[-1].num_bytes
                self._queued_bytes -= size
                self._oldest = time.monotonic()
            lines, self._lines = self._lines, []
            self._writing = bool(batch or lines)  # nobody waits for a merge
            return batch, lines

    def _due(self) -> bool:
        if not self._trajectories:
            return False
        aged = time.monotonic() - self._oldest >= self._seal_seconds
        return aged or self._stopping or self._queued_bytes >= self._shard_bytes

    def _persist(self, manifest: ManifestWriter, batch: list[Parcel], lines: list[Line]) -> None:
        """Returns when all is durable. Raises Superseded, or OSError when stopped meanwhile."""
        if not batch and not lines:
            return
        image = shard_image(batch) if batch else None
        number = self._next_shard
        sealed: Shard | None = None
        while True:
            try:
                self._check_owner()
                if image is not None:
                    sealed = self._seal(number, image, batch)
                manifest.append([*lines, *([sealed] if sealed is not None else [])])
                self._check_owner()
                break
            except OSError as err:
                self._pause(err)
        self.paused = ""
        with self._changed:
            self.pending_bytes -= sum(t.num_bytes for t in batch)
            if sealed is not None:
                self._next_shard += 1
                self._count(sealed, 1)
                self._small.add(sealed)
            self._sealed.append(
                Sealed(
                    trajectories=tuple((t, (number, row)) for row, t in enumerate(batch)),
                    lines=tuple(lines),
                )
            )
        self._wake()

    def _mergeable(self) -> bool:
        return not self._stopping and time.monotonic() >= self._merge_after and self._chosen() != []

    def _chosen(self) -> list[Shard]:
        """What to merge now: under load, only when much has gathered."""
        return self._small.choose(backlog=HURRY if self._due() else 1)

    def _compact(self, manifest: ManifestWriter) -> None:
        """Merges small shards if it is time to; what goes wrong leaves everything as it was.

        The line in the manifest retires the sources; only then are their files removed. Whoever
        has an old place finds the row through that line.
        """
        with self._changed:
            sources = self._chosen() if self._mergeable() else []
            number = self._next_shard
        if not sources:
            return
        try:
            line = merge(self._run, sources, number=number)
            sync_directory(self._run.shards)
            self._check_owner()
            manifest.append([line])
        except ShardDamaged as err:  # its readers report it; the dispatcher decides on it
            log.warning("not merged: %s", err)
            with self._changed:
                self._small.remove(err.shard)
            return
        except OSError as err:
            log.warning("small shards are not merged just now: %s", err)
            self._run.shard(number).unlink(missing_ok=True)
            self._merge_after = time.monotonic() + MERGE_RETRY_SECONDS
            return
        # A successor that started meanwhile may not know the line: its files stay.
        self._check_owner()
        with self._changed:
            self._next_shard += 1
            self._count(line, 1)
            self._small.add(line)
            for source in sources:
                self._count(source, -1)
                self._small.remove(source.number)
            self._sealed.append(Sealed(trajectories=(), lines=(line,)))
        for source in sources:
            self._run.shard(source.number).unlink(missing_ok=True)
        self._wake()

    def _count(self, line: Shard, change: int) -> None:
        self.num_shards += change
        self.stored_bytes += change * line.num_bytes

    def _seal(self, number: int, image: ShardImage, batch: Sequence[Parcel]) -> Shard:
        path = self._run.shard(number)
        # A file of that number without a manifest line is the remains of a failed try of this one.
        path.unlink(missing_ok=True)
        digest = write_shard(path, image=image)
        sync_directory(path.parent)
        return Shard(
            number=number,
            digest=digest,
            num_bytes=image.num_bytes,
            rows=tuple((t.group_id, t.rollout_index, t.outcome.usable) for t in batch),
        )

    def _pause(self, err: OSError) -> None:
        self.paused = (
            f"can't write to {self._run.manifest.parent}: {err.strerror or err}; "
            "make room there, it goes on by itself"
        )
        self._wake()
        with self._changed:
            if self._stopping:
                raise err
            self._changed.wait(timeout=RETRY_SECONDS)
            if self._stopping:
                raise err

    def _check_owner(self) -> None:
        mark = read_owner(self._run)
        if mark is not None and mark != self._mark:
            raise Superseded(
                f"another attempt of the buffer job (owner {mark.owner}) has taken over this run"
            )


def take_ownership(run: Run, *, owner: int, token: str) -> None:
    """From now on, older attempts of the buffer job acknowledge nothing any more."""
    mark = OwnerMark(owner=owner, token=token)
    publish(_mark_path(run), data=msgspec.json.encode(mark))


def read_owner(run: Run) -> OwnerMark | None:
    """The present owner."""
    try:
        return msgspec.json.decode(_mark_path(run).read_bytes(), type=OwnerMark)
    except FileNotFoundError:
        return None


def _mark_path(run: Run) -> Path:
    return run.manifest.with_name("owner.json")
