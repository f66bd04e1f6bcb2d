"""The manifest: one JSON line per durable fact. Knows lines, not what follows from them.

Every attempt of the buffer job opens with an `Owner` line. Lines of an older owner that come after
it (a node that was cut off and lives on) don't count.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from hpc.errors import HpcError, UserError
from hpc.files import sync_directory
from prorl_hpc.records import Kind

FORMAT = 2
"""2: the digest of a shard names its algorithm. Lines of format 1 are read."""


class ManifestError(UserError, ValueError):
    """A manifest that is damaged in its middle, or of a newer format."""


class Superseded(HpcError, RuntimeError):
    """A newer attempt of the buffer job owns the run."""


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    """Base of all lines."""

    owner: int = 0
    """Generation of the attempt that wrote it."""


class Owner(Line, frozen=True, kw_only=True):
    """A new attempt has taken over."""

    format: int
    attempt: int
    host: str


class Shard(Line, frozen=True, kw_only=True, omit_defaults=True):
    """A sealed shard."""

    number: int
    digest: str = ""
    """With its algorithm; see `digest`."""
    sha256: str = ""
    """Instead of it, in lines of format 1."""
    num_bytes: int
    rows: tuple[tuple[int, int, bool], ...]
    """(group, rollout index, usable) of each row."""

    @property
    def checksum(self) -> str:
        """The digest that its bytes must have."""
        return self.digest or f"sha256:{self.sha256}"


class Merged(Shard, frozen=True, kw_only=True, omit_defaults=True):
    """A shard with all rows of small ones, which don't count from here on."""

    sources: tuple[tuple[int, int], ...]
    """(number, first row here) of each: its row `r` is row `first + r` of this shard."""


class Closed(Line, frozen=True, kw_only=True):
    """A group that is ready for the learner."""

    group: int
    kind: Kind
    task: str
    instance_id: str
    num_rollouts: int
    rollouts: tuple[tuple[int, int, int, bool], ...]
    """(rollout index, shard, row, usable) of everything durable, masked rollouts included."""
    reason: str
    num_solved: int = 0
    num_known: int = 0
    """Rewards that were known when it closed, and how many of them count as solved."""

    def touches(self, shard: int) -> bool:
        """Whether a usable rollout lies in that shard."""
        return any(number == shard and usable for _, number, _, usable in self.rollouts)


class Dropped(Line, frozen=True, kw_only=True):
    """A group that was given up."""

    group: int
    kind: Kind
    reason: str


class Chosen(Line, frozen=True, kw_only=True):
    """The instance that the curriculum chose for a training group."""

    group: int
    index: int
    context: str = ""
    probability: float = 0.0
    """What a bandit learns from later: the features it saw, and how likely the choice was."""


class Limit(Line, frozen=True, kw_only=True):
    """From now on, training groups below `limit` may be leased; they belong to `version`."""

    limit: int
    version: int


class Validation(Line, frozen=True, kw_only=True):
    """A validation that the learner asked for."""

    version: int
    counts: dict[str, int]
    num_rollouts: int


class Quarantined(Line, frozen=True, kw_only=True):
    """A shard that couldn't be read; its trajectories are lost."""

    number: int
    reason: str


class Finished(Line, frozen=True, kw_only=True):
    """The run is done."""

    reason: str


AnyLine = (
    Owner | Shard | Merged | Closed | Dropped | Chosen | Limit | Validation | Quarantined | Finished
)

_decoder = msgspec.json.Decoder(AnyLine)
_encoder = msgspec.json.Encoder()


def read_lines(path: Path, *, offset: int = 0) -> Iterator[tuple[AnyLine, int]]:
    """Complete lines from byte `offset` on, each with the offset behind it.

    A last line without its newline is not there yet. Raises ManifestError.
    """
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        return
    with stream:
        stream.seek(offset)
        for raw in stream:
            if not raw.endswith(b"\n"):
                return
            offset += len(raw)
            if raw.strip():
                yield _line(raw, path=path, offset=offset), offset


def valid_lines(path: Path) -> Iterator[AnyLine]:
    """All lines but those that an owner wrote after it had been superseded."""
    owner = 0
    for line, _ in read_lines(path):
        if isinstance(line, Owner):
            owner = max(owner, line.owner)
        if line.owner >= owner:
            yield line


class Moves:
    """Where rows lie by now: old places stay valid through the merges that came after."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self._moved: dict[int, tuple[int, int]] = {}
        for line in lines:
            if isinstance(line, Merged):
                self.add(line)

    def __contains__(self, shard: int) -> bool:
        return shard in self._moved

    def add(self, line: Merged) -> None:
        """The sources' rows lie in the merged shard now."""
        for source, first in line.sources:
            self._moved[source] = (line.number, first)

    def place(self, shard: int, row: int) -> tuple[int, int]:
        """Present (shard, row) of what was sealed, or last known, there."""
        while shard in self._moved:
            shard, first = self._moved[shard]
            row += first
        return shard, row

    def of(self, line: Closed) -> Closed:
        """The same closing record, with present places."""
        if not any(shard in self._moved for _, shard, _, _ in line.rollouts):
            return line
        rollouts = tuple(
            (rollout, *self.place(shard, row), usable)
            for rollout, shard, row, usable in line.rollouts
        )
        return msgspec.structs.replace(line, rollouts=rollouts)


def live_shards(lines: Iterable[Line]) -> dict[int, Shard]:
    """Shards in force, by number: neither merged into another one nor quarantined."""
    shards: dict[int, Shard] = {}
    for line in lines:
        if isinstance(line, Shard):
            shards[line.number] = line
        if isinstance(line, Merged):
            for source, _ in line.sources:
                shards.pop(source, None)
        elif isinstance(line, Quarantined):
            shards.pop(line.number, None)
    return shards


def cut_torn_tail(path: Path) -> None:
    """Removes a last line that a crash left incomplete."""
    end = 0
    if not path.exists():
        return
    with path.open("rb+") as stream:
        for raw in stream:
            if not raw.endswith(b"\n"):
                break
            end += len(raw)
        if end != stream.seek(0, os.SEEK_END):
            stream.truncate(end)
            os.fsync(stream.fileno())


class ManifestWriter:
    """Appends lines durably. One thread."""

    def __init__(self, path: Path, *, owner: int) -> None:
        self._owner = owner
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sync_directory(path.parent)

    def append(self, lines: Iterable[Line]) -> None:
        """All of the lines or none. Raises OSError with the file as it was."""
        stamped = (msgspec.structs.replace(line, owner=self._owner) for line in lines)
        data = memoryview(b"".join(_encoder.encode(line) + b"\n" for line in stamped))
        before = os.fstat(self._descriptor).st_size
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, before)
            raise

    def close(self) -> None:
        os.close(self._descriptor)


class ManifestTail:
    """Follows a growing manifest for readers: which shards there are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._owner = 0
        self._shards: dict[int, Shard] = {}
        self.moves = Moves()

    def shard(self, number: int) -> Shard | None:
        """The shard's line, or None when it is unknown or quarantined."""
        if number not in self._shards:
            self.refresh()
        return self._shards.get(number)

    def refresh(self) -> None:
        """Reads what was appended since the last look. Raises ManifestError."""
        for line, offset in read_lines(self._path, offset=self._offset):
            self._offset = offset
            if isinstance(line, Owner):
                self._owner = max(self._owner, line.owner)
            if line.owner < self._owner:
                continue
            if isinstance(line, Shard):
                self._shards[line.number] = line
            elif isinstance(line, Quarantined):
                self._shards.pop(line.number, None)
            if isinstance(line, Merged):
                self.moves.add(line)


def _line(raw: bytes, *, path: Path, offset: int) -> AnyLine:
    try:
        line = _decoder.decode(raw)
    except msgspec.MsgspecError as err:
        raise ManifestError(
            f"{path} is damaged before byte {offset} ({err}); restore it, or remove that line"
        ) from err
    if isinstance(line, Owner) and line.format > FORMAT:
        raise ManifestError(
            f"format={line.format} of {path} is newer than {FORMAT}; upgrade prorl-hpc"
        )
    return line
