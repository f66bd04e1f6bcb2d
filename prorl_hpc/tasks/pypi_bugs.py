"""Builds an instance of the PyPI form: two source releases in, a git tree and hidden tests out.

    buggy release --> git tree (one commit)          the agent works here
    fixed release --> hidden tests: test files that differ
    fixed - buggy --> gold patch, within the source paths

Needs pip, git and, the first time, the network. Knows no sandbox and no agent.
"""

import hashlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath

import msgspec

from hpc.errors import UserError
from hpc.images_lease import lease
from prorl_hpc.tasks.swe.bug import Bug, PypiFacts, Release
from prorl_hpc.tasks.swe.patches import is_under
from prorl_hpc.tasks.swe.store import Built, InstanceStore

RECIPE_OF_BUILD = "1"
"""Part of every key: raised when the build changes what it makes."""

PIP_SECONDS = 900.0
GIT_SECONDS = 120.0
WAIT_SECONDS = 3600.0

OLD_SETUPTOOLS = "setuptools<72\n"
"""Releases from before PEP 517's spread use what later versions removed."""

SUPPLIES = ("tzdata==2025.2",)
"""Installed beside an instance's requirements: small images lack a database of time zones."""

ARCHIVES = (".tar.gz", ".tar.bz2", ".zip")

Tree = dict[str, bytes]
"""Relative path -> content."""


class BuildError(UserError, RuntimeError):
    """An instance that can't be built; the message says which step failed, and why."""


def build_pypi(bug: Bug, store: InstanceStore) -> Built:
    """The instance, found in the store or built there: once, however many ask at the same time.

    Raises BuildError, with nothing half-made left.
    """
    facts = bug.pypi
    assert facts is not None, bug.instance_id
    key = _key(bug, facts)
    found = store.built(bug.instance_id)
    site = site_key(facts)
    if found is not None and found.key == key and store.site(site).is_dir():
        return found
    held = store.lease(bug.instance_id)
    try:
        held.parent.mkdir(parents=True, exist_ok=True)
        with lease(held, wait_seconds=WAIT_SECONDS):
            _ensure_site(facts, store, site)
            return _build(bug, facts, store, key=key, site=site)
    except OSError as err:
        if isinstance(err, UserError):
            raise
        raise BuildError(f"{bug.instance_id}: the store {store.root} fails: {err}") from err


def _build(bug: Bug, facts: PypiFacts, store: InstanceStore, *, key: str, site: str) -> Built:
    found = store.built(bug.instance_id)
    if found is not None and found.key == key:
        return found
    buggy, fixed = (
        release_tree(fetch(release, store), package=release.package, root=bug.pythonpath)
        for release in (facts.buggy, facts.fixed)
    )
    hidden = {
        path: data
        for path, data in fixed.items()
        if is_under(path, bug.rule.tests) and buggy.get(path) != data
    }
    work = store.root / ".making" / f"{bug.instance_id}.{secrets.token_hex(6)}"
    try:
        (work / "out" / "open").mkdir(parents=True)
        made = make_repository(work / "repo", buggy, gold_of(buggy, fixed, bug, facts))
        _compare(bug, facts, made)
        out = work / "out"
        pack(work / "repo", out / "open" / "repo.tar")
        (out / "hidden.tar").write_bytes(tar_of(hidden))
        (out / "gold.patch").write_bytes(made.patch)
        built = Built(key=key, base_commit=made.commit, site=site, hidden=tuple(sorted(hidden)))
        (out / "built.json").write_bytes(msgspec.json.encode(built))
        target = store.bug(bug.instance_id)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        out.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return built


def _compare(bug: Bug, facts: PypiFacts, made: "Repository") -> None:
    for label, known, found in (
        ("buggy_tree", facts.buggy_tree, made.tree),
        ("gold_tree", facts.gold_tree, made.gold_tree),
    ):
        if known and known != found:
            raise BuildError(
                f"{bug.instance_id}: {label} is {found}, the data set says {known}; the release "
                "isn't the one that was checked"
            )
    if not made.patch:
        raise BuildError(f"{bug.instance_id}: both releases agree in {facts.source_paths}")


# --- releases ----------------------------------------------------------------------------------


def fetch(release: Release, store: InstanceStore) -> Path:
    """The source release, downloaded by pip unless it is there; its digest is checked."""
    cache = store.sdists / f"{release.package}-{release.version}"
    cache.mkdir(parents=True, exist_ok=True)
    found = _archive_in(cache)
    if found is None:
        said = _download(release, cache)
        found = _archive_in(cache)
        if found is None:
            raise BuildError(f"pip can't fetch {release.package}=={release.version}: {said}")
    digest = hashlib.sha256(found.read_bytes()).hexdigest()
    if digest != release.sha256:
        found.unlink()
        raise BuildError(
            f"{found.name} has sha256 {digest} instead of {release.sha256}; it was deleted"
        )
    return found


def _archive_in(directory: Path) -> Path | None:
    found = [path for path in directory.iterdir() if path.name.endswith(ARCHIVES)]
    return min(found, default=None)


def _download(release: Release, cache: Path) -> str:
    """pip's last words; empty when it went well."""
    constraint = cache / "constraint.txt"
    constraint.write_text(OLD_SETUPTOOLS)
    said = ""
    # the package alone is taken as source: its build tools may come as wheels
    command = ["download", "--no-deps", "--no-binary", release.package, "-d", str(cache)]
    command.append(f"{release.package}=={release.version}")
    for extra in ({}, {"PIP_CONSTRAINT": str(constraint)}):
        said = pip(command, extra=extra)
        if not said:
            break
    return said


def pip(arguments: list[str], *, extra: Mapping[str, str] | None = None) -> str:
    """Runs pip of this interpreter; returns its last line when it fails, without addresses."""
    argv = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(
            argv, env={**os.environ, **(extra or {})}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", timeout=PIP_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end after {PIP_SECONDS:.0f} s"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    return re.sub(r"\b[a-z][a-z0-9+.-]*://\S+", "<address>", errors[-1])[:300]


def release_tree(archive: Path, *, package: str, root: str) -> Tree:
    """The files of a source release, without its top directory, byte code and links.

    The metadata goes beside the package, so that `importlib.metadata` finds it uninstalled.
    """
    files: Tree = {}
    for name, data in _members(archive):
        parts = PurePosixPath(name).parts[1:]
        if parts and not PurePosixPath(name).is_absolute() and ".." not in parts:
            files["/".join(parts)] = data
    entry_points = b""
    for path in sorted(files):
        words = path.split("/")
        in_metadata = any(word.endswith(".egg-info") for word in words[:-1])
        if in_metadata and words[-1] == "entry_points.txt" and not entry_points:
            entry_points = files[path]
        if in_metadata or "__pycache__" in words or path.endswith((".pyc", ".pyo")):
            del files[path]
    if "PKG-INFO" in files:
        name = re.sub(r"[-_.]+", "_", package).lower()
        directory = f"{root}/{name}.egg-info" if root else f"{name}.egg-info"
        files[f"{directory}/PKG-INFO"] = files["PKG-INFO"]
        if entry_points:
            files[f"{directory}/entry_points.txt"] = entry_points
    return files


def _members(archive: Path) -> list[tuple[str, bytes]]:
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as packed:
                return [(i.filename, packed.read(i)) for i in packed.infolist() if not i.is_dir()]
        found = []
        with tarfile.open(archive) as tar:
            for member in tar:
                stream = tar.extractfile(member) if member.isfile() else None
                if stream is not None:
                    found.append((member.name, stream.read()))
        return found
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as err:
        raise BuildError(f"{archive} is damaged ({err}); delete it and build again") from err


def gold_of(buggy: Tree, fixed: Tree, bug: Bug, facts: PypiFacts) -> dict[str, bytes | None]:
    """Path -> content in the fixed release (None: gone), where source files differ."""
    changed: dict[str, bytes | None] = {}
    for path in sorted({*buggy, *fixed}):
        counts = is_under(path, facts.source_paths) and not is_under(path, bug.rule.tests)
        if not counts or (facts.exclude_suffixes and path.endswith(facts.exclude_suffixes)):
            continue
        if buggy.get(path) != fixed.get(path):
            changed[path] = fixed.get(path)
    return changed


# --- git ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """What was made with git."""

    commit: str
    tree: str
    gold_tree: str
    patch: bytes


def make_repository(root: Path, files: Tree, gold: Mapping[str, bytes | None]) -> Repository:
    """A repository with one commit of `files`, clean; and the patch that leads to `gold`."""
    root.mkdir(parents=True)
    _write(root, files)
    git(root, "init", "-q")
    # the project's own .gitattributes must not rewrite anything; this file is asked first
    attributes = root / ".git" / "info" / "attributes"
    attributes.parent.mkdir(exist_ok=True)
    attributes.write_text("* -text -ident -filter -working-tree-encoding !diff !eol\n")
    git(root, "add", "-A", "-f")
    git(root, "commit", "-q", "--no-verify", "-m", "base")
    commit, tree = git(root, "rev-parse", "HEAD", "HEAD^{tree}").decode().split()
    for path, data in gold.items():
        if data is None:
            (root / path).unlink()
        else:
            _write(root, {path: data})
    git(root, "add", "-A", "-f")
    patch = git(
        root, "diff", "--cached", "--binary", "--full-index", "--no-color", "--no-ext-diff",
        "--no-textconv", "--no-renames", "HEAD",
    )  # fmt: skip
    gold_tree = git(root, "write-tree").decode().strip()
    git(root, "reset", "-q", "--hard", "HEAD")
    git(root, "clean", "-q", "-fdx")
    # the objects of the repair must not lie in the agent's repository
    git(root, "reflog", "expire", "--expire=now", "--all")
    git(root, "gc", "-q", "--prune=now")
    return Repository(commit=commit, tree=tree, gold_tree=gold_tree, patch=patch)


def git(root: Path, *arguments: str) -> bytes:
    """Runs git with nobody's configuration and fixed names and dates. Raises BuildError."""
    who = {"NAME": "prorl", "EMAIL": "prorl@localhost", "DATE": "2000-01-01T00:00:00Z"}
    names = {f"GIT_{role}_{k}": v for role in ("AUTHOR", "COMMITTER") for k, v in who.items()}
    options = (
        "core.autocrlf=false", "core.fileMode=false", "init.defaultBranch=main", "gc.auto=0",
        "core.hooksPath=/dev/null", "diff.noprefix=false", "diff.mnemonicPrefix=false",
        "safe.directory=*", "diff.algorithm=myers", "diff.context=3",
    )  # fmt: skip
    argv = ["git", "-C", str(root), *(word for option in options for word in ("-c", option))]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment = kept | names | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    try:
        done = subprocess.run(
            [*argv, *arguments], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=GIT_SECONDS, check=False,
        )  # fmt: skip
    except (FileNotFoundError, subprocess.TimeoutExpired) as err:
        raise BuildError(f"git {arguments[0]}: {err}") from err
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip()[-300:]
        raise BuildError(f"git {arguments[0]}: {words}")
    return done.stdout


def _write(root: Path, files: Tree) -> None:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def pack(directory: Path, target: Path) -> None:
    """A tar archive of a directory, owned by nobody in particular."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(target, "w") as tar:
        tar.add(directory, arcname=".", filter=plain)


def tar_of(files: Tree) -> bytes:
    """A tar archive of files in memory."""
    stream = BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name in sorted(files):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(files[name]), 0o644
            tar.addfile(info, BytesIO(files[name]))
    return stream.getvalue()


# --- requirements ------------------------------------------------------------------------------


def _ensure_site(facts: PypiFacts, store: InstanceStore, key: str) -> None:
    target = store.site(key)
    if target.is_dir():
        return
    with lease(store.lease(f"site-{key}"), wait_seconds=WAIT_SECONDS):
        if target.is_dir():
            return
        work = store.root / ".making" / f"site-{key}.{secrets.token_hex(6)}"
        try:
            work.parent.mkdir(parents=True, exist_ok=True)
            # the list is complete, and a requirement may itself require the package under test
            work.mkdir()
            options = ["--no-deps", "--no-compile", "--upgrade", "--target", str(work)]
            said = pip(["install", *options, *facts.requirements, *SUPPLIES])
            if said:
                raise BuildError(f"requirements {', '.join(facts.requirements)}: pip says {said}")
            target.parent.mkdir(parents=True, exist_ok=True)
            work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def site_key(facts: PypiFacts) -> str:
    version = ".".join(map(str, sys.version_info[:2]))
    text = "\n".join([version, *SUPPLIES, *sorted(facts.requirements)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _key(bug: Bug, facts: PypiFacts) -> str:
    parts = (RECIPE_OF_BUILD, msgspec.json.encode(facts), msgspec.json.encode(bug.rule),
             bug.pythonpath, site_key(facts))  # fmt: skip
    text = "\0".join(p.decode() if isinstance(p, bytes) else p for p in parts)
    return hashlib.sha256(text.encode()).hexdigest()
