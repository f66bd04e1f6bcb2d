"""Jobs and results on disk: what a client asked for survives a restart until it is fetched.

One SQLite file, written by one process. Knows no pipeline.
"""

import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc.errors import HpcError
from prorl_hpc.service.schema import JobState

FORMAT = 2

_SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT UNIQUE NOT NULL,
    idempotency_key TEXT UNIQUE,
    request TEXT NOT NULL,
    state TEXT NOT NULL,
    submitted REAL NOT NULL,
    fetched REAL,
    result BLOB,
    detail TEXT NOT NULL DEFAULT '',
    ended REAL,
    num_finished INTEGER NOT NULL DEFAULT 0,
    num_usable INTEGER NOT NULL DEFAULT 0
)""",
    "CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state)",
)

_COLUMNS = "number, id, request, state, submitted, detail, num_finished, num_usable"

_FROM_1 = (
    "ALTER TABLE jobs ADD COLUMN ended REAL",
    "ALTER TABLE jobs ADD COLUMN num_finished INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE jobs ADD COLUMN num_usable INTEGER NOT NULL DEFAULT 0",
)
"""What makes a file of format 1 one of format 2."""


class StoreError(HpcError, RuntimeError):
    """The store can't be used: newer format, damaged, disk full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredJob:
    """One row."""

    number: int
    """Grows with each job; the group id of its trajectories."""
    id: str
    request: str
    """JSON of the request."""
    state: JobState
    submitted: float
    """Unix seconds."""
    detail: str
    num_finished: int
    """Samples of the result."""
    num_usable: int


class JobStore:
    """Every method is one short transaction; blocking, in the event loop's thread."""

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        """Raises StoreError for a file of a newer format."""
        self._now = now
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            if found > FORMAT:
                raise StoreError(
                    f"{path} has format {found}, newer than {FORMAT}; update prorl-hpc"
                )
            self._bring_up(found)
        except (sqlite3.Error, OSError) as err:
            raise StoreError(
                f"job store {path} can't be opened: {err}; name another --dir"
            ) from err

    def _bring_up(self, found: int) -> None:
        """Tables of this format, all of them or (after a kill) none."""
        statements = [*(_FROM_1 if found == 1 else ()), *_SCHEMA]
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:  # commits, or rolls back
            for statement in statements:
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version={FORMAT}")

    def add(self, job_id: str, *, request: str, idempotency_key: str | None) -> StoredJob:
        """Records a new job as queued, durably."""
        self._do(
            "INSERT INTO jobs (id, idempotency_key, request, state, submitted) VALUES (?,?,?,?,?)",
            (job_id, idempotency_key, request, JobState.queued.value, self._now()),
        )
        job = self.get(job_id)
        assert job is not None
        return job

    def get(self, job_id: str) -> StoredJob | None:
        return self._one("id = ?", job_id)

    def by_key(self, idempotency_key: str) -> StoredJob | None:
        return self._one("idempotency_key = ?", idempotency_key)

    def result(self, job_id: str) -> bytes | None:
        """The result of a job that is over."""
        row = self._do("SELECT result FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return None if row is None else row[0]

    def unfinished(self) -> list[StoredJob]:
        """Jobs that a dead server left, at work or not, in the order they came."""
        return self._many("state = ? ORDER BY number", JobState.queued.value)

    def finish(
        self,
        job_id: str,
        *,
        state: JobState,
        result: bytes,
        detail: str,
        num_finished: int = 0,
        num_usable: int = 0,
    ) -> None:
        """Makes a result durable."""
        self._do(
            "UPDATE jobs SET state = ?, result = ?, detail = ?, ended = ?, num_finished = ?, "
            "num_usable = ? WHERE id = ?",
            (state.value, result, detail, self._now(), num_finished, num_usable, job_id),
        )

    def mark_fetched(self, job_id: str) -> None:
        self._do(
            "UPDATE jobs SET fetched = ? WHERE id = ? AND fetched IS NULL", (self._now(), job_id)
        )

    def remove(self, job_id: str) -> None:
        self._do("DELETE FROM jobs WHERE id = ?", (job_id,))

    def sweep(self, *, keep_fetched_seconds: float, keep_unfetched_seconds: float) -> int:
        """Removes results that were fetched so long ago, cancelled jobs of that age, and results
        that nobody came for."""
        before = self._now() - keep_fetched_seconds
        swept = self._do(
            "DELETE FROM jobs WHERE fetched < ? OR (state = 'cancelled' AND submitted < ?) "
            "OR ended < ?",
            (before, before, self._now() - keep_unfetched_seconds),
        )
        return swept.rowcount

    def num_unfetched(self) -> int:
        """Results that wait for their client."""
        row = self._do(
            "SELECT COUNT(*) FROM jobs WHERE fetched IS NULL AND state IN ('done', 'failed')"
        ).fetchone()
        return int(row[0])

    @property
    def num_added(self) -> int:
        """Jobs ever added, those removed since included."""
        row = self._do("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'").fetchone()
        return 0 if row is None else int(row[0])

    def close(self) -> None:
        self._db.close()

    def _do(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.Error as err:
            raise StoreError(
                f"job store {self._path} failed: {err}; is its disk full or gone?"
            ) from err

    def _one(self, where: str, value: str) -> StoredJob | None:
        return next(iter(self._many(where, value)), None)

    def _many(self, where: str, value: str) -> list[StoredJob]:
        rows = self._do(f"SELECT {_COLUMNS} FROM jobs WHERE {where}", (value,))  # noqa: S608 - texts of ours
        return [_job(row) for row in rows]


def _job(row: tuple[int, str, str, str, float, str, int, int]) -> StoredJob:
    number, job_id, request, state, submitted, detail, num_finished, num_usable = row
    return StoredJob(
        number=number,
        id=job_id,
        request=request,
        state=JobState(state),
        submitted=submitted,
        detail=detail,
        num_finished=num_finished,
        num_usable=num_usable,
    )
