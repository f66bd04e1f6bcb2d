"""Where built instances lie, what each is made of, and what checking them found. Builds nothing.

store/sdists/                       source releases, as they came
store/sites/KEY/                    test requirements, shared by instances that ask for the same
store/bugs/ID/open/repo.tar         the buggy tree with its git directory; the agent gets this
store/bugs/ID/hidden.tar, gold.patch, built.json       never inside of an agent's sandbox
store/validation/ID.json            whether the tests tell the bug from its repair
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from hpc.files import publish
from prorl_hpc.tasks.base import TaskError

FORMAT = 1


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """What a build leaves behind, beside the files themselves."""

    key: str
    """Digest of everything that went into it."""
    base_commit: str = ""
    site: str = ""
    """Name below `sites/`; empty: the image brings the requirements."""
    hidden: tuple[str, ...] = ()
    """Paths of the hidden tests."""
    format: int = FORMAT


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What checking one instance found."""

    instance_id: str
    key: str
    """Of the build that was checked."""
    ok: bool
    reason: str = ""
    """Why it is excluded; one line."""
    untouched_seconds: float = 0.0
    gold_seconds: float = 0.0
    image: str = ""
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceStore:
    """Owns every path below `root`. Reading needs read access only."""

    root: Path

    @property
    def sdists(self) -> Path:
        return self.root / "sdists"

    def bug(self, instance_id: str) -> Path:
        """Everything of one instance."""
        return self.root / "bugs" / instance_id

    def repository(self, instance_id: str) -> Path:
        """The directory that may be seen by the agent; it holds `repo.tar`."""
        return self.bug(instance_id) / "open"

    def hidden(self, instance_id: str) -> Path:
        return self.bug(instance_id) / "hidden.tar"

    def gold(self, instance_id: str) -> Path:
        return self.bug(instance_id) / "gold.patch"

    def site(self, key: str) -> Path:
        """A directory of installed requirements."""
        return self.root / "sites" / key

    def lease(self, name: str) -> Path:
        """Held by whoever builds `name`."""
        return self.root / ".leases" / f"{name}.lease"

    def built(self, instance_id: str) -> Built | None:
        """What was built of that name; None when nothing was. Raises TaskError when damaged."""
        return _read(self.bug(instance_id) / "built.json", Built)

    def verdict(self, instance_id: str) -> Verdict | None:
        """What the last check said; None when there was none. Raises TaskError when damaged."""
        return _read(self._verdict_path(instance_id), Verdict)

    def record(self, verdict: Verdict) -> None:
        """Keeps a check's result. Raises OSError."""
        path = self._verdict_path(verdict.instance_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, data=msgspec.json.format(msgspec.json.encode(verdict)) + b"\n")

    def _verdict_path(self, instance_id: str) -> Path:
        return self.root / "validation" / f"{instance_id}.json"


Known = TypeVar("Known", Built, Verdict)


def _read(path: Path, kind: type[Known]) -> Known | None:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as err:
        raise TaskError(f"{path} can't be read ({err}); delete it and build again") from err
    if found.format > FORMAT:
        raise TaskError(f"{path} has format {found.format}, newer than {FORMAT}; update prorl-hpc")
    return found
