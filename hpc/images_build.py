"""How an image's bytes are made: from definitions, directories and archives, without a registry.

Starts the runtime's own `build`, in a session of its own with an end. Knows nothing of the store's
layout beyond `ImageStore.ensure`.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import tarfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hpc.container import Runtime, host_environment
from hpc.errors import ImageError
from hpc.images import ImageRecord, ImageStore, digest
from hpc.images_lease import lease

BUILD_SECONDS = 4 * 3600.0
COMPRESSION = "-comp zstd -Xcompression-level 3"
"""Ten times faster than the default, for a few per cent of size."""


class SourceKind(StrEnum):
    """What an import can start from."""

    sif = "sif"
    directory = "directory"
    """A root file system."""
    tar = "tar"
    """A root file system in an archive."""
    docker_archive = "docker-archive"
    """`docker save`, `podman save`."""
    oci_archive = "oci-archive"
    oci = "oci"
    """A directory with `oci-layout`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A recognised source with its size."""

    kind: SourceKind
    path: Path
    num_bytes: int
    key: str
    """Changes when the source does."""


def recognise(path: Path) -> Source:
    """Looks at what `path` holds. Raises ImageError when it is none of the kinds."""
    if path.is_dir():
        if (path / "oci-layout").is_file():
            key = digest(path / "index.json") if (path / "index.json").is_file() else ""
            return Source(kind=SourceKind.oci, path=path, num_bytes=_size(path), key=f"oci:{key}")
        if not any((path / name).exists() for name in ("bin", "usr", "etc")):
            raise ImageError(f"source {path} is no root file system: it has no bin, usr or etc")
        size, key = _survey(path)
        return Source(kind=SourceKind.directory, path=path, num_bytes=size, key=f"directory:{key}")
    if not path.is_file():
        raise ImageError(
            f"source {path} doesn't exist; give a root directory, a tar archive of one, a "
            "`docker save` archive, an OCI directory or archive, or a SIF file"
        )
    kind = _kind_of_file(path)
    return Source(kind=kind, path=path, num_bytes=path.stat().st_size, key=f"{kind}:{digest(path)}")


def _kind_of_file(path: Path) -> SourceKind:
    with path.open("rb") as stream:
        if b"SIF_MAGIC" in stream.read(64):
            return SourceKind.sif
    try:
        with tarfile.open(path) as archive:
            names = {member.name.removeprefix("./") for member in archive}
    except (tarfile.TarError, OSError, EOFError) as err:
        raise ImageError(f"source {path} is neither a SIF file nor a whole tar archive") from err
    if "oci-layout" in names and "manifest.json" not in names:
        return SourceKind.oci_archive
    if "manifest.json" in names:
        return SourceKind.docker_archive
    if any(name.split("/")[0] in ("bin", "usr", "etc") for name in names):
        return SourceKind.tar
    raise ImageError(f"source {path} holds neither an image nor a root file system")


def _survey(root: Path) -> tuple[int, str]:
    """Size and a digest over names, sizes and times: quick, and enough to see a change."""
    total, seen = 0, hashlib.sha256()
    for directory, names, files in os.walk(root):
        names.sort()
        for name in sorted(files):
            path = Path(directory) / name
            status = path.lstat()
            total += status.st_size
            seen.update(
                f"{path.relative_to(root)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(
                    errors="surrogateescape"
                )
            )
    return total, seen.hexdigest()


def _size(root: Path) -> int:
    return _survey(root)[0]


def import_image(
    store: ImageStore, name: str, *, source: Path, runtime: Runtime | None, force: bool = False,
    timeout_seconds: float = BUILD_SECONDS,
) -> ImageRecord:  # fmt: skip
    """Puts an image made elsewhere into the store. Raises ImageError."""
    known = recognise(source.absolute())

    def make(target: Path) -> None:
        _need_room(target.parent, known.num_bytes, what=str(source))
        if known.kind is SourceKind.sif:
            shutil.copyfile(known.path, target)
            return
        origin = str(known.path)
        if known.kind is SourceKind.tar:
            origin = str(_extract(known.path, target.with_suffix(".rootfs")))
        elif known.kind is not SourceKind.directory:
            origin = f"{known.kind}:{known.path}"
        run_build(
            _needed(runtime), target=target, origin=origin, directory=target.parent,
            timeout_seconds=timeout_seconds,
        )  # fmt: skip

    return store.ensure(
        name, source=f"{known.kind}:{source}", source_key=known.key, make=make, force=force
    )


def build_image(
    store: ImageStore, name: str, *, definition: Path, runtime: Runtime | None, force: bool = False,
    timeout_seconds: float = BUILD_SECONDS,
) -> ImageRecord:  # fmt: skip
    """Builds from a definition file; `From: base.sif` names an image of the store.

    The key covers the definition and the locked digest of such a base. Raises ImageError.
    """
    try:
        text = definition.read_text()
    except (OSError, ValueError) as err:
        raise ImageError(f"definition {definition} can't be read: {err}") from err
    key = hashlib.sha256(text.encode())
    for record in store.list():
        if f"{record.name}.sif" in text:
            store.verify(record.name)
            key.update(record.sha256.encode())

    def make(target: Path) -> None:
        run_build(
            _needed(runtime), target=target, origin=str(definition.absolute()),
            directory=store.root, timeout_seconds=timeout_seconds,
        )  # fmt: skip

    return store.ensure(
        name, source=f"definition:{definition.name}", source_key=f"definition:{key.hexdigest()}",
        make=make, force=force,
    )  # fmt: skip


def unpack_image(
    store: ImageStore, name: str, *, cache: Path, runtime: Runtime | None,
    timeout_seconds: float = 600.0,
) -> Path:  # fmt: skip
    """The image as a directory on local disk, made once per digest and node. Raises ImageError.

    The directory belongs to the user who unpacks it (rootless containers need that), so `cache`
    must be the user's own.
    """
    record = store.verify(name)
    target = cache / f"{name}-{record.sha256[:16]}"
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with lease(cache / f"{target.name}.lease", wait_seconds=timeout_seconds):
            if target.is_dir():
                return target
            _need_room(cache, 3 * record.num_bytes, what=f"unpacking {name}")
            temporary = cache / f".{target.name}.tmp"
            shutil.rmtree(temporary, ignore_errors=True)  # of a killed attempt: we hold the lease
            try:
                run_build(
                    _needed(runtime), target=temporary, origin=str(store.path(name)),
                    directory=cache, timeout_seconds=timeout_seconds, sandbox=True,
                )  # fmt: skip
                temporary.rename(target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as err:
        if isinstance(err, ImageError):
            raise
        raise ImageError(f"cache {cache} can't be written: {err.strerror}") from err
    return target


def run_build(
    runtime: Runtime, *, target: Path, origin: str, directory: Path, timeout_seconds: float,
    sandbox: bool = False,
) -> None:  # fmt: skip
    """`apptainer build` with an end. Raises ImageError with the runtime's last words."""
    argv = [runtime.path, "-q", "build"]
    argv += ["--sandbox"] if sandbox else ["--mksquashfs-args", COMPRESSION]
    argv += [str(target), origin]
    what = f"build from {origin}"
    log = target.with_name(f"{target.name}.log")
    _run(argv, directory=directory, log=log, timeout_seconds=timeout_seconds, what=what)
    if not target.exists():
        raise ImageError(f"{what} ended well and made nothing at {target}")


def _run(
    argv: list[str], *, directory: Path, log: Path, timeout_seconds: float, what: str
) -> None:  # fmt: skip
    """One external step in a session of its own, ended whole at its time."""
    environment = host_environment(log.parent, base=os.environ)
    try:
        with log.open("wb") as sink:
            process = subprocess.Popen(
                argv, env=environment, cwd=directory, stdin=subprocess.DEVNULL, stdout=sink,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            code = process.wait(timeout=timeout_seconds)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if code != 0:
            raise ImageError(f"{what} failed ({code}): {last_words(log)}")
    except subprocess.TimeoutExpired as err:
        raise ImageError(
            f"{what} took more than timeout_seconds={timeout_seconds:g}: {last_words(log)}"
        ) from err
    except OSError as err:
        if isinstance(err, ImageError):
            raise
        raise ImageError(f"{what} can't start: {err.strerror}") from err
    finally:
        log.unlink(missing_ok=True)


def last_words(log: Path) -> str:
    """The last lines of a build's log that say something, in one line."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 4000))
        lines = stream.read().decode(errors="replace").splitlines()
    words = [line.strip() for line in lines if line.strip()]
    return " | ".join(words[-4:]) or "no output"


def _needed(runtime: Runtime | None) -> Runtime:
    if runtime is None:
        raise ImageError(
            "building images needs Apptainer >= 1.2 or SingularityCE >= 3.11 on PATH; install one, "
            "or import a SIF file that was built elsewhere"
        )
    return runtime


def _need_room(directory: Path, num_bytes: int, *, what: str) -> None:
    free = shutil.disk_usage(directory).free
    if free < 2 * num_bytes:
        raise ImageError(
            f"{what}: {directory} has {free >> 20} MiB free and the build needs about "
            f"{2 * num_bytes >> 20} MiB; choose another scratch directory"
        )


def _extract(archive: Path, target: Path) -> Path:
    """Unpacks a root file system. tar keeps names and links inside; devices are left out."""
    target.mkdir()
    argv = ["tar", "--extract", "--file", str(archive), "--directory", str(target)]
    argv += ["--no-same-owner", "--exclude=dev/*", "--exclude=./dev/*"]
    _run(argv, directory=target, log=target.with_suffix(".log"), timeout_seconds=BUILD_SECONDS,
         what=f"unpacking {archive}")  # fmt: skip
    return target
