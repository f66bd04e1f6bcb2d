"""Append-only record of jobs, attempts and exits of one run. Asks no scheduler, decides nothing.

One JSON object per line. Jobs of many hosts append to the same file: a line is one write under a
file lock where the file system has locks. A torn line is skipped and counted; a newer format is
refused.
"""

import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hpc.errors import LedgerError
from hpc.files import NO_LOCKS

FORMAT = 1
"""Format number of the records that are written here."""


NO_ATTEMPT = 0
"""Attempt number of an end that came before any attempt (the script itself failed)."""


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every line says."""

    time: float
    """Unix seconds, by the clock of the host that wrote it."""
    job: str
    format: int = msgspec.field(default=FORMAT)


class Intent(Record, frozen=True, kw_only=True, tag="intent"):
    """Written before `sbatch`: a submission that may or may not have happened."""

    token: str
    """Stands in the comment of the Slurm job, by which it is found again."""
    script: str
    indexes: str | None = None
    """Indexes of the run that were asked for, as `0-15,20`; None without an array."""


class Submit(Record, frozen=True, kw_only=True, tag="submit"):
    """A submission that the scheduler took."""

    token: str
    job_id: str
    indexes: str | None = None
    index_offset: int = 0
    """Index of the run minus array index of Slurm."""


class Start(Record, frozen=True, kw_only=True, tag="start"):
    """An attempt began."""

    role: str
    index: int
    attempt: int
    job_id: str
    host: str
    deadline: float | None = None
    progress: float | None = None


class Heartbeat(Record, frozen=True, kw_only=True, tag="heartbeat"):
    """An attempt lives."""

    index: int
    attempt: int


class Exit(Record, frozen=True, kw_only=True, tag="exit"):
    """An attempt ended."""

    index: int
    attempt: int
    code: int
    next: str
    """`finished`, `again`, `failed`, `exhausted` or `cancelled`."""
    reason: str
    asked: str = ""
    progress: float | None = None


class Requeue(Record, frozen=True, kw_only=True, tag="requeue"):
    """Another attempt was asked for; `job_id` differs from the old one after a resubmission."""

    index: int
    attempt: int
    job_id: str
    how: str
    token: str = ""
    """That of the resubmission's intent."""


class Cancel(Record, frozen=True, kw_only=True, tag="cancel"):
    """The user ended the job, or some indexes of it."""

    indexes: str | None = None
    reason: str = ""


class Resume(Record, frozen=True, kw_only=True, tag="resume"):
    """The user asked for the job again; earlier ends no longer count."""

    indexes: str | None = None


Entry = Intent | Submit | Start | Heartbeat | Exit | Requeue | Cancel | Resume
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Entry)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """The readable entries of a ledger, oldest first."""

    entries: tuple[Entry, ...]
    damaged_lines: int


@dataclass(kw_only=True, slots=True)
class History:
    """What the ledger knows about one index of one job."""

    job: str
    index: int
    starts: list[Start] = field(default_factory=list)
    exits: dict[int, Exit] = field(default_factory=dict)
    """By attempt."""
    requeues: list[Requeue] = field(default_factory=list)
    cancelled: str = ""
    """Why the user (or the end of the run) ended it; empty where nobody did."""

    @property
    def last_start(self) -> Start | None:
        return max(self.starts, key=lambda start: start.attempt, default=None)

    @property
    def last_exit(self) -> Exit | None:
        """How the last attempt ended; None while it runs (or died without a word)."""
        start = self.last_start
        return self.exits.get(start.attempt if start is not None else NO_ATTEMPT)


def append(path: Path, *, entry: Entry) -> None:
    """Appends one entry durably. Raises OSError when the file can't be written."""
    line = _encoder.encode(entry) + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        _lock(descriptor)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # the line before was torn: don't join it
        os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
    except OSError as err:
        if err.errno not in NO_LOCKS:
            raise


def read(path: Path) -> Ledger:
    """All readable entries; an absent file is an empty ledger.

    Raises LedgerError for an entry of a newer format.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return Ledger(entries=(), damaged_lines=0)
    entries: list[Entry] = []
    damaged = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entries.append(_decoder.decode(line))
        except (msgspec.ValidationError, msgspec.DecodeError) as err:
            _refuse_newer(line, path=path, number=number, cause=err)
            damaged += 1
    newer = next((entry for entry in entries if entry.format > FORMAT), None)
    if newer is not None:
        raise LedgerError(_newer(path, newer.format))
    return Ledger(entries=tuple(entries), damaged_lines=damaged)


def _newer(path: Path, number: int) -> str:
    return f"{path} holds records of format {number}, newer than {FORMAT}; update prorl-hpc"


def _refuse_newer(line: bytes, *, path: Path, number: int, cause: Exception) -> None:
    """A line that can't be decoded may be torn, or be of a kind that this version doesn't know."""
    try:
        raw: Any = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return
    if isinstance(raw, dict) and isinstance(raw.get("format"), int) and raw["format"] > FORMAT:
        raise LedgerError(f"line {number}: {_newer(path, raw['format'])}") from cause


def fold(ledger: Ledger) -> dict[tuple[str, int], History]:
    """The history of each (job, index) that the ledger mentions."""
    histories: dict[tuple[str, int], History] = {}

    def of(job: str, index: int) -> History:
        return histories.setdefault((job, index), History(job=job, index=index))

    for entry in ledger.entries:
        if isinstance(entry, Start):
            of(entry.job, entry.index).starts.append(entry)
            of(entry.job, entry.index).cancelled = ""
        elif isinstance(entry, Exit):
            of(entry.job, entry.index).exits[entry.attempt] = entry
        elif isinstance(entry, Requeue):
            of(entry.job, entry.index).requeues.append(entry)
        elif isinstance(entry, (Cancel, Resume, Submit)):
            for index in parse_indexes(entry.indexes):
                of(entry.job, index).cancelled = (
                    (entry.reason or "cancelled") if isinstance(entry, Cancel) else ""
                )
    return histories


def parse_indexes(text: str | None) -> tuple[int, ...]:
    """`0-2,5` as (0, 1, 2, 5); None, a job without an array, as (0,)."""
    if text is None:
        return (0,)
    indexes: list[int] = []
    for part in text.split(",") if text else ():
        low, _, high = part.partition("-")
        indexes.extend(range(int(low), int(high or low) + 1))
    return tuple(indexes)


def format_indexes(indexes: tuple[int, ...] | list[int]) -> str:
    """(0, 1, 2, 5) as `0-2,5`."""
    parts: list[list[int]] = []
    for index in sorted(set(indexes)):
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in parts)
