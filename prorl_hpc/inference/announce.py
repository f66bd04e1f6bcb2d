"""How inference jobs and rollout nodes find each other: one small file per server of a run.

    inference job --publish every few seconds--> endpoints/inference/<index>.json --Board--> rollout

A file whose beat stands still is of a server that died without a word: `Board` leaves it out. The
reader's own clock measures that, never the writer's; only who looks just once (`beating`) goes by
the files' times. Opens no connection.
"""

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from hpc.errors import UserError
from hpc.files import publish as publish_file
from prorl_hpc.run import Run

FORMAT = 1
"""Format number of an announcement."""

BEAT_SECONDS = 5.0
EXPIRY_SECONDS = 60.0
"""So long after its last beat a server counts as gone: longer than a file system's caches."""


class TokenError(UserError, RuntimeError):
    """The run's bearer token is missing or open to others."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one server listens."""

    run: str
    index: int
    attempt: int
    host: str
    port: int
    identity: str
    """Random name of this very process: nobody else's server is taken for it."""
    beat: int
    """Grows as long as the server is well."""
    version: int
    """Policy version that it serves."""
    in_flight: int
    job_id: str = ""
    format: int = FORMAT

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def announce(run: Run, announcement: Announcement) -> bool:
    """Publishes it atomically; False when a later attempt of this index already has."""
    run.announcements.mkdir(parents=True, exist_ok=True)
    before = read(run, announcement.index)
    if before is not None and before.attempt > announcement.attempt:
        return False
    publish_file(run.announcement(announcement.index), data=msgspec.json.encode(announcement))
    return True


def withdraw(run: Run, *, index: int, identity: str) -> None:
    """Removes the file if it is still this process's."""
    found = read(run, index)
    if found is not None and found.identity == identity:
        run.announcement(index).unlink(missing_ok=True)


def read(run: Run, index: int) -> Announcement | None:
    """One server's file; None where there is none that this version can read."""
    try:
        found = msgspec.json.decode(run.announcement(index).read_bytes(), type=Announcement)
    except (OSError, msgspec.DecodeError):
        return None
    return found if found.format <= FORMAT and found.run == run.name else None


def read_all(run: Run) -> list[Announcement]:
    """All servers' files, those of dead servers included; by index."""
    try:
        return _readable(run, _indexes(run))
    except OSError:
        return []


def beating(run: Run, *, now: float) -> list[Announcement]:
    """Servers whose files were written lately, as seen at Unix time `now`; by index."""
    return [one for one in read_all(run) if now - _written(run, one.index) <= EXPIRY_SECONDS]


def _indexes(run: Run) -> list[int]:
    """Whose files there are. Raises OSError where the directory can't be read just now."""
    try:
        names = [path.stem for path in run.announcements.iterdir() if path.suffix == ".json"]
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdecimal())


def _readable(run: Run, indexes: Iterable[int]) -> list[Announcement]:
    found = (read(run, index) for index in indexes)
    return [one for one in found if one is not None]


def _written(run: Run, index: int) -> float:
    try:
        return run.announcement(index).stat().st_mtime
    except OSError:
        return 0.0


def describe(announcements: list[Announcement]) -> str:
    """One line for people."""
    if not announcements:
        return "inference: no server is announced"
    versions = sorted({one.version for one in announcements})
    told = f"{versions[0]}" if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
    in_flight = sum(one.in_flight for one in announcements)
    count = len(announcements)
    return (
        f"inference: {count} server{'' if count == 1 else 's'} announced, policy version {told}, "
        f"{in_flight} requests in flight"
    )


@dataclass(kw_only=True, slots=True)
class _Seen:
    announcement: Announcement
    changed: float


class Board:
    """The announcements of a run, without those that stand still."""

    def __init__(
        self,
        run: Run,
        *,
        clock: Callable[[], float] = time.monotonic,
        expiry_seconds: float = EXPIRY_SECONDS,
    ) -> None:
        self._run = run
        self._clock = clock
        self._expiry_seconds = expiry_seconds
        self._seen: dict[int, _Seen] = {}

    def look(self) -> list[Announcement]:
        """Who serves, as far as files tell; a file seen for the first time counts as fresh.

        A file that is there and can't be read just now (a busy file system; it is being replaced)
        counts as it was: only one that is gone was withdrawn.
        """
        now = self._clock()
        try:
            there = _indexes(self._run)
        except OSError:
            there = list(self._seen)
        seen = {index: self._seen[index] for index in there if index in self._seen}
        for found in _readable(self._run, there):
            before = self._seen.get(found.index)
            same = before is not None and (
                (before.announcement.identity, before.announcement.beat)
                == (found.identity, found.beat)
            )
            changed = before.changed if before is not None and same else now
            seen[found.index] = _Seen(announcement=found, changed=changed)
        self._seen = seen
        return [
            seen[index].announcement
            for index in sorted(seen)
            if now - seen[index].changed <= self._expiry_seconds
        ]


def make_token(run: Run) -> None:
    """Makes the run's bearer token, once."""
    run.secrets.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not run.inference_token.exists():
        publish_file(run.inference_token, data=secrets.token_urlsafe(32).encode(), mode=0o600)


def load_token(run: Run) -> str:
    """The run's bearer token. Raises TokenError."""
    path = run.inference_token
    try:
        mode = path.stat().st_mode
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as err:
        raise TokenError(f"token file {path} can't be read: {err}; submit the run again") from err
    if mode & 0o077:
        raise TokenError(f"token file {path} is open to others; run `chmod 600` on it")
    if not token:
        raise TokenError(f"token file {path} is empty; delete it and submit the run again")
    return token
