"""The shared, read-only store of images: one file per image and one lock file of digests.

    store/NAME.sif      published by a rename, never changed in place
    store/images.lock   JSON: what each image's bytes must be, and what it was made from
    store/.leases/      who builds what now

Knows names, digests and publishing; how an image's bytes are made is `hpc.images_build`'s. Knows
nothing of learning.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc.errors import ImageError
from hpc.files import publish, sync_directory
from hpc.images_lease import is_held, lease

LOCK_FORMAT = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
WAIT_SECONDS = 4 * 3600.0
LOCK_WAIT_SECONDS = 120.0


class ImageMissing(ImageError, FileNotFoundError):
    """An image that the store doesn't have (on a job: an infrastructure failure)."""


class DigestMismatch(ImageError):
    """An image whose bytes aren't those of the lock file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRecord:
    """One line of the lock file."""

    name: str
    sha256: str
    num_bytes: int
    source: str
    """What it was made from, for people."""
    source_key: str
    """Digest of that source: asked for again under the same key, nothing is built."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What `verify` found for one image; `problem` is empty when all is well."""

    name: str
    problem: str


class ImageStore:
    """A store at `root`. Readers need read access only."""

    def __init__(self, root: Path, *, scratch: Path | None = None) -> None:
        """`scratch` is local disk for builds; by default beside the store's files."""
        self.root = root
        self._scratch = scratch

    @property
    def lock_path(self) -> Path:
        """The digests."""
        return self.root / "images.lock"

    def path(self, name: str) -> Path:
        """Where the image of that name is, or would be. Raises ImageError for a bad name."""
        if not NAME.fullmatch(name):
            raise ImageError(
                f"image name {name!r} may hold letters, digits, '.', '_' and '-' only, 128 at most"
            )
        return self.root / f"{name}.sif"

    # --- reading -------------------------------------------------------------------------------

    def list(self) -> tuple[ImageRecord, ...]:
        """All locked images, by name. Raises ImageError when the lock file can't be read."""
        return tuple(self._read().values())

    def record(self, name: str) -> ImageRecord:
        """The lock's line for `name`. Raises ImageMissing."""
        self.path(name)
        try:
            return self._read()[name]
        except KeyError:
            known = ", ".join(sorted(self._read())) or "none"
            raise ImageMissing(
                f"image {name!r} is not in {self.lock_path} (it has: {known}); "
                f"build or import it: prorl-hpc images build|import {name} ..."
            ) from None

    def verify(self, name: str) -> ImageRecord:
        """Reads the image whole and compares. Raises ImageMissing or DigestMismatch."""
        record, path = self.record(name), self.path(name)
        try:
            size = path.stat().st_size
            found = digest(path) if size == record.num_bytes else f"{size} bytes"
        except FileNotFoundError as err:
            raise ImageMissing(f"image file {path} is missing; build or import it again") from err
        except OSError as err:
            raise ImageError(f"image file {path} can't be read: {err.strerror}") from err
        if found != record.sha256:
            raise DigestMismatch(
                f"image {path} differs from images.lock: {found} instead of {record.sha256} "
                f"({record.num_bytes} bytes); build or import it again, or restore the file"
            )
        return record

    def verify_all(self) -> tuple[Verification, ...]:
        """Every image's state; one bad image doesn't hide the others."""
        found = []
        for record in self.list():
            try:
                self.verify(record.name)
                problem = ""
            except ImageError as err:
                problem = str(err)
            found.append(Verification(name=record.name, problem=problem))
        return tuple(found)

    # --- writing -------------------------------------------------------------------------------

    def ensure(
        self, name: str, *, source: str, source_key: str, make: Callable[[Path], None],
        force: bool = False, wait_seconds: float = WAIT_SECONDS,
    ) -> ImageRecord:  # fmt: skip
        """The image of that key: found, waited for, or made by `make(path)`, once for all askers.

        `make` writes a new file on scratch disk; only whole files reach the store. Raises
        ImageError, with nothing half-made left in the store.
        """
        target = self.path(name)
        found = None if force else self._find(name, source_key)
        if found is not None:
            return found
        with self._lease(name, wait_seconds):
            found = None if force else self._find(name, source_key)
            if found is not None:
                return found
            self._sweep(name)
            with self._workspace(name) as workspace:
                made = workspace / f"{name}.sif"
                make(made)
                if not made.is_file():
                    raise ImageError(f"image {name!r}: the build from {source} made no file")
                record = ImageRecord(
                    name=name, sha256=digest(made), num_bytes=made.stat().st_size, source=source,
                    source_key=source_key,
                )  # fmt: skip
                self._publish(made, target)
            self._update({name: record})
        return record

    def remove(self, name: str) -> None:
        """Takes an image out of the lock and deletes its file."""
        self.record(name)
        self._update({name: None})
        self.path(name).unlink(missing_ok=True)

    def gc(self, *, dry_run: bool = False) -> tuple[Path, ...]:
        """Deletes what no lock line names and nobody builds now; returns those paths."""
        known = {f"{record.name}.sif" for record in self.list()}
        garbage = []
        for entry in sorted(self.root.iterdir()):
            name = re.sub(r"^\.(.*)\.sif\.[0-9a-f]{12}\.tmp$", r"\1", entry.name)
            unlocked = entry.suffix == ".sif" and entry.name not in known
            if not unlocked and name == entry.name:
                continue
            owner = name.removesuffix(".sif")
            if not is_held(self._lease_path(owner)):
                garbage.append(entry)
                if not dry_run:
                    entry.unlink(missing_ok=True)
        return tuple(garbage)

    # --- parts ---------------------------------------------------------------------------------

    def _find(self, name: str, source_key: str) -> ImageRecord | None:
        record = self._read().get(name)
        if record is None or record.source_key != source_key:
            return None
        try:
            whole = self.path(name).stat().st_size == record.num_bytes
        except FileNotFoundError:
            whole = False
        return record if whole else None

    def _lease_path(self, name: str) -> Path:
        return self.root / ".leases" / f"{name}.lease"

    def _lease(self, name: str, wait_seconds: float) -> contextlib.AbstractContextManager[None]:
        path = self._lease_path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise ImageError(f"store {self.root} can't be written: {err.strerror}") from err
        return lease(path, wait_seconds=wait_seconds)

    @contextlib.contextmanager
    def _workspace(self, name: str) -> Iterator[Path]:
        """A private directory on scratch disk, removed in any case."""
        base = self._builds
        workspace = base / f"{self._workspace_prefix(name)}{secrets.token_hex(6)}"
        try:
            workspace.mkdir(parents=True, mode=0o700)
        except OSError as err:
            raise ImageError(f"scratch {base} can't be written: {err.strerror}") from err
        try:
            yield workspace
        finally:
            shutil.rmtree(workspace, ignore_errors=True)

    def _publish(self, made: Path, target: Path) -> None:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
        try:
            with made.open("rb") as source, temporary.open("xb") as sink:
                shutil.copyfileobj(source, sink, 1 << 22)
                sink.flush()
                os.fsync(sink.fileno())
            temporary.chmod(0o755)
            temporary.rename(target)
            sync_directory(target.parent)
        except OSError as err:
            temporary.unlink(missing_ok=True)
            raise ImageError(
                f"image {target} can't be published: {err.strerror}; free space in the store "
                "(prorl-hpc images gc) and start again"
            ) from err

    def _sweep(self, name: str) -> None:
        """Under the lease nobody else publishes this image: what lies here is of killed builds."""
        for left in self.root.glob(f".{name}.sif.*.tmp"):
            left.unlink(missing_ok=True)
        for left in self._builds.glob(f"{self._workspace_prefix(name)}*"):
            shutil.rmtree(left, ignore_errors=True)

    @property
    def _builds(self) -> Path:
        return self._scratch or self.root / ".builds"

    def _workspace_prefix(self, name: str) -> str:
        # scratch may serve several stores
        store = hashlib.sha256(str(self.root.absolute()).encode()).hexdigest()[:8]
        return f"prorl-image-{store}-{name}@"

    def _read(self) -> dict[str, ImageRecord]:
        try:
            document = json.loads(self.lock_path.read_bytes())
            if document["format"] > LOCK_FORMAT:
                raise ImageError(
                    f"{self.lock_path} has format {document['format']}, newer than {LOCK_FORMAT}; "
                    "update prorl-hpc"
                )
            records = [ImageRecord(**entry) for entry in document["images"]]
        except FileNotFoundError:
            return {}
        except OSError as err:
            raise ImageError(f"{self.lock_path} can't be read: {err.strerror}") from err
        except (ValueError, TypeError, KeyError) as err:
            if isinstance(err, ImageError):
                raise
            raise ImageError(
                f"{self.lock_path} is damaged ({err}); restore it from a copy"
            ) from err
        return {record.name: record for record in sorted(records, key=lambda r: r.name)}

    def _update(self, changes: dict[str, ImageRecord | None]) -> None:
        with self._lease("images.lock", LOCK_WAIT_SECONDS):
            records = self._read()
            for name, record in changes.items():
                if record is None:
                    records.pop(name, None)
                else:
                    records[name] = record
            entries = [asdict(records[name]) for name in sorted(records)]
            text = json.dumps({"format": LOCK_FORMAT, "images": entries}, indent=1) + "\n"
            try:
                publish(self.lock_path, data=text.encode())
            except OSError as err:
                raise ImageError(f"{self.lock_path} can't be written: {err.strerror}") from err


def digest(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
