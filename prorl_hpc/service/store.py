"""Jobs and results on disk: what a client asked for survives a restart until it is fetched.

One SQLite file, written by one process. Knows no pipeline.
"""

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpc.errors import HpcError
from prorl_hpc.service.schema import JobState

FORMAT = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT UNIQUE NOT NULL,
    idempotency_key TEXT UNIQUE,
    request TEXT NOT NULL,
    state TEXT NOT NULL,
    submitted REAL NOT NULL,
    fetched REAL,
    result BLOB,
    detail TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state);
"""


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
    result: bytes | None
    detail: str


class JobStore:
    """Every method is one short transaction; blocking, in the event loop's thread."""

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        """Raises StoreError for a file of a newer format."""
        self._now = now
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            if found > FORMAT:
                raise StoreError(
                    f"{path} has format {found}, newer than {FORMAT}; update prorl-hpc"
                )
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={FORMAT}")
        except sqlite3.Error as err:
            raise StoreError(
                f"job store {path} can't be opened: {err}; name another --dir"
            ) from err

    def add(self, job_id: str, *, request: str, idempotency_key: str | None) -> StoredJob:
        """Records a new job as queued, durably."""
        self._db.execute(
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

    def unfinished(self) -> list[StoredJob]:
        """Jobs that a dead server left, at work or not, in the order they came."""
        rows = self._db.execute(
            "SELECT number, id, request, state, submitted, result, detail FROM jobs "
            "WHERE state = 'queued' ORDER BY number"
        ).fetchall()
        return [_job(row) for row in rows]

    def finish(self, job_id: str, *, state: JobState, result: bytes, detail: str) -> None:
        """Makes a result durable."""
        self._db.execute(
            "UPDATE jobs SET state = ?, result = ?, detail = ? WHERE id = ?",
            (state.value, result, detail, job_id),
        )

    def mark_fetched(self, job_id: str) -> None:
        self._db.execute(
            "UPDATE jobs SET fetched = ? WHERE id = ? AND fetched IS NULL", (self._now(), job_id)
        )

    def remove(self, job_id: str) -> None:
        self._db.execute("DELETE FROM jobs WHERE id = ?", (job_id,))

    def sweep(self, *, keep_fetched_seconds: float) -> int:
        """Removes results that were fetched so long ago, and cancelled jobs of that age."""
        before = self._now() - keep_fetched_seconds
        swept = self._db.execute(
            "DELETE FROM jobs WHERE fetched < ? OR (state = 'cancelled' AND submitted < ?)",
            (before, before),
        )
        return swept.rowcount

    def num_unfetched(self) -> int:
        """Results that wait for their client."""
        row = self._db.execute(
            "SELECT COUNT(*) FROM jobs WHERE fetched IS NULL AND state IN ('done', 'failed')"
        ).fetchone()
        return int(row[0])

    def close(self) -> None:
        self._db.close()

    def _one(self, where: str, value: str) -> StoredJob | None:
        row = self._db.execute(
            f"SELECT number, id, request, state, submitted, result, detail FROM jobs WHERE {where}",  # noqa: S608 - one of our own two texts
            (value,),
        ).fetchone()
        return None if row is None else _job(row)


def _job(row: tuple[int, str, str, str, float, bytes | None, str]) -> StoredJob:
    number, job_id, request, state, submitted, result, detail = row
    return StoredJob(
        number=number,
        id=job_id,
        request=request,
        state=JobState(state),
        submitted=submitted,
        result=result,
        detail=detail,
    )
