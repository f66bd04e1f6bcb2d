"""Published policy versions: directories of safetensors with a manifest. Knows no torch.

    policy/v00000120/   config.json, *.safetensors, tokenizer files, manifest.json
    policy/latest       {"format": 1, "version": 120, "step": 120}

A version directory appears whole (temporary directory, fsync, rename) and never changes; `latest`
is replaced after it. Readers check the hashes before they load, so that a damaged version is
refused instead of served.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from hpc.errors import HpcError
from hpc.files import aside, publish, replace_directory, sync_directory, sync_file
from prorl_hpc.run import Run

FORMAT = 1
"""Format number of a version's manifest and of `latest`."""

MANIFEST = "manifest.json"
VERSION_NAME = re.compile(r"v(\d{8,})")


class PolicyError(HpcError, ValueError):
    """A policy version that is missing, damaged, or of a newer format."""


class PolicyManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a version directory holds."""

    format: int
    version: int
    step: int
    """Optimizer step whose weights these are."""
    files: dict[str, str]
    """sha256 of each file, by its name relative to the directory."""

    @property
    def digest(self) -> str:
        """Tells two versions of one number apart: after a crash a number can be trained again."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


class _Latest(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    version: int
    step: int


def publish_policy(
    run: Run, *, version: int, step: int, write: Callable[[Path], None]
) -> PolicyManifest:
    """Publishes one version: `write` fills the directory it is given, then it appears as a whole.

    A version that exists with the same bytes stays as it is; one with other bytes (of a history
    that a crash lost) is replaced. Raises OSError with nothing half-made left behind.
    """
    manifest = publish_directory(run.policy(version), version=version, step=step, write=write)
    set_latest(run, version=version, step=step)
    return manifest


def publish_directory(
    target: Path, *, version: int, step: int, write: Callable[[Path], None]
) -> PolicyManifest:
    """A directory of policy files with its manifest, made durable and renamed into place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = aside(target)
    temporary.mkdir()
    try:
        write(temporary)
        manifest = PolicyManifest(
            format=FORMAT, version=version, step=step, files=hash_files(temporary)
        )
        publish(temporary / MANIFEST, data=msgspec.json.format(msgspec.json.encode(manifest)))
        if not _is_whole(target, manifest):
            sync_tree(temporary)
            replace_directory(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def _is_whole(target: Path, manifest: PolicyManifest) -> bool:
    try:
        return verify_policy(target) == manifest
    except PolicyError:
        return False


def _remove(target: Path) -> None:
    """Removes a directory; renamed first, so that nobody finds half of it under its name."""
    if not target.exists():
        return
    grave = aside(target)
    target.rename(grave)
    shutil.rmtree(grave, ignore_errors=True)


def set_latest(run: Run, *, version: int, step: int) -> None:
    """Points `latest` at a published version."""
    data = msgspec.json.encode(_Latest(format=FORMAT, version=version, step=step))
    publish(run.latest_policy, data=data)


def latest_version(run: Run) -> int | None:
    """Newest published version; None before the first. Raises PolicyError if unreadable."""
    try:
        data = run.latest_policy.read_bytes()
    except FileNotFoundError:
        return None
    try:
        latest = msgspec.json.decode(data, type=_Latest)
    except msgspec.DecodeError as err:
        raise PolicyError(f"{run.latest_policy} can't be read ({err}); publish again") from err
    if latest.format > FORMAT:
        raise PolicyError(
            f"{run.latest_policy} has format {latest.format}, newer than {FORMAT}; update prorl-hpc"
        )
    return latest.version


def read_manifest(path: Path) -> PolicyManifest:
    """The manifest of a version directory, unchecked; raises PolicyError."""
    try:
        data = (path / MANIFEST).read_bytes()
        manifest = msgspec.json.decode(data, type=PolicyManifest)
    except (OSError, msgspec.DecodeError) as err:
        raise PolicyError(f"policy {path} has no readable {MANIFEST}: {err}") from err
    if manifest.format > FORMAT:
        raise PolicyError(
            f"policy {path} has format {manifest.format}, newer than {FORMAT}; update prorl-hpc"
        )
    return manifest


def digest_at(path: Path) -> str:
    """Digest of the version in `path`, its files unchecked; empty where no manifest is readable."""
    try:
        return read_manifest(path).digest
    except PolicyError:
        return ""


def verify_policy(path: Path) -> PolicyManifest:
    """Checks every file against its hash; raises PolicyError naming the first that differs."""
    manifest = read_manifest(path)
    for name, expected in manifest.files.items():
        try:
            found = hash_file(path / name)
        except OSError as err:
            raise PolicyError(f"policy {path}: {name} can't be read: {err}") from err
        if found != expected:
            raise PolicyError(
                f"policy {path}: {name} has sha256 {found[:12]}..., the manifest says "
                f"{expected[:12]}...; the version is damaged"
            )
    return manifest


def published_versions(run: Run) -> list[int]:
    """Versions whose directories exist, in ascending order."""
    if not run.policies.is_dir():
        return []
    matches = (VERSION_NAME.fullmatch(entry.name) for entry in run.policies.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def keep_newest(run: Run, n: int, *, protect: Collection[int] = ()) -> list[int]:
    """Removes all but the newest `n` versions and the protected ones; returns what it removed."""
    versions = published_versions(run)
    doomed = [v for v in versions[: max(len(versions) - n, 0)] if v not in protect]
    for version in doomed:
        _remove(run.policy(version))
    return doomed


def discard_newer(run: Run, version: int) -> list[int]:
    """Removes versions above `version`: those of a history that a crash lost.

    Call it once `version` is published: `latest` must not name one that goes.
    """
    doomed = [v for v in published_versions(run) if v > version]
    for newer in doomed:
        _remove(run.policy(newer))
    return doomed


def hash_file(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_files(directory: Path) -> dict[str, str]:
    """sha256 of every file below `directory`, by relative name."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): hash_file(path) for path in files}


def sync_tree(directory: Path) -> None:
    """Makes every file and directory below `directory`, and itself, durable."""
    for path in directory.rglob("*"):
        if path.is_dir():
            sync_directory(path)
        else:
            sync_file(path)
    sync_directory(directory)
