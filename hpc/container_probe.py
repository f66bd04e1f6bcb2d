"""What of the container command lines works on this machine, found by trying it.

Starts short trials over a skeleton of the host's own /usr: no image is needed. Decides nothing:
`hpc.container.resolve` does.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path

from hpc.cgroups import find_scope_runner, probe_place
from hpc.container import (
    Features,
    Launch,
    Runtime,
    bubblewrap_argv,
    container_argv,
    host_environment,
)
from hpc.isolation import Feature

RUNTIME_VARIABLE = "PRORL_APPTAINER"
"""Names another apptainer or singularity binary than the first one on PATH."""

PROBE_SECONDS = 60.0
TRIAL = "probe"
NAMESPACES = {
    "pid": Feature.pid_namespace, "net": Feature.network_none, "user": Feature.user_namespace,
}  # fmt: skip
SCRIPT = (
    "readlink /proc/self/ns/pid /proc/self/ns/net /proc/self/ns/user; "
    "touch /.prorl-probe 2>/dev/null && echo written; exit 0"
)
LOOK = ("/bin/sh", "-c", SCRIPT)
"""What a trial runs: it tells from the inside what it was given."""


def parse_version(text: str, *, path: str) -> Runtime | None:
    """Reads `apptainer version 1.4.5+ds1` or `singularity-ce version 4.1.0-jammy`; else None."""
    match = re.match(r"(apptainer|singularity)(-ce)? version v?(\d+(?:\.\d+)*)(\S*)", text.strip())
    if match is None:
        return None
    version = tuple(int(word) for word in match[3].split("."))
    return Runtime(
        flavour=match[1], path=path, version=version, version_text=f"{match[3]}{match[4]}"
    )


def find_runtime(path: str | None = None) -> Runtime | None:
    """The runtime at `path`, else of PRORL_APPTAINER, else on PATH; None when there is none."""
    asked = path or os.environ.get(RUNTIME_VARIABLE)
    for name in [asked] if asked else ["apptainer", "singularity"]:
        found = shutil.which(name)
        if found:
            done = _trial([found, "--version"], environment=dict(os.environ))
            runtime = parse_version(done.stdout.decode(errors="replace"), path=found)
            if runtime is not None:
                return runtime
    return None


@lru_cache(maxsize=8)
def probe(runtime_path: str | None = None) -> Features:
    """Tries every feature on this machine, once per process (about half a second)."""
    kernel = tuple(int(word) for word in re.findall(r"\d+", os.uname().release)[:2])
    runtime = find_runtime(runtime_path)
    with tempfile.TemporaryDirectory(prefix="prorl-probe-") as name:
        scratch = Path(name)
        image = _host_image(scratch)
        container, tmpfs, error = _probe_container(runtime, image, scratch)
        bwrap = shutil.which("bwrap")
        version, inside, said = _probe_bubblewrap(bwrap, scratch)
    return Features(
        runtime=runtime, container=container, container_error=error, tmpfs_layer=tmpfs,
        bubblewrap=bwrap,
        bubblewrap_version=version, bubblewrap_features=inside, bubblewrap_error=said,
        kernel=kernel, groups=(groups := probe_place()),
        scope_runner=find_scope_runner() if groups is None else None,
    )  # fmt: skip


def _host_image(scratch: Path) -> Path:
    """A skeleton over which the host's /usr is bound: enough to run `true` in."""
    image = scratch / "image"
    for name in ("usr", "proc", "sys", "dev", "etc", "tmp", "var/tmp", "root", "home"):
        (image / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        host = Path("/") / name
        if host.is_symlink():
            (image / name).symlink_to(host.readlink())
        elif host.is_dir():
            (image / name).mkdir()
    return image


def _probe_container(
    runtime: Runtime | None, image: Path, scratch: Path
) -> tuple[frozenset[Feature], bool, str]:
    if runtime is None:
        return frozenset(), True, "neither apptainer nor singularity is on PATH"
    if not runtime.is_supported:
        return frozenset(), True, f"{runtime.flavour} {runtime.version_text} is too old"
    binds = [
        (Path("/") / name, f"/{name}", False)
        for name in ("usr", "bin", "sbin", "lib", "lib64")
        if (Path("/") / name).is_dir() and not (Path("/") / name).is_symlink()
    ]
    environment = host_environment(scratch, base=os.environ)

    def attempt(features: frozenset[Feature], *, tmpfs: bool = True) -> str:
        layer = Path(tempfile.mkdtemp(dir=scratch))
        (layer / "tmp").mkdir()
        launch = Launch(image=image, layer=layer, binds=binds, token=TRIAL, command=LOOK)
        argv = container_argv(runtime, launch, features=features, tmpfs=tmpfs)
        return _judge(_trial(argv, environment=environment), features)

    found, error = _climb(attempt)
    if found:
        return found, True, error
    # where overlays are forbidden, the layer in memory is as well
    found, _ = _climb(partial(attempt, tmpfs=False))
    return found, False, error


def _probe_bubblewrap(
    path: str | None, scratch: Path
) -> tuple[tuple[int, ...], frozenset[Feature], str]:
    if path is None:
        return (), frozenset(), "bwrap is not on PATH"
    environment = host_environment(scratch, base=os.environ)
    text = _trial([path, "--version"], environment=environment).stdout.decode(errors="replace")
    version = tuple(int(word) for word in re.findall(r"\d+", text))
    layer = scratch / "bwrap"
    (layer / "tmp").mkdir(parents=True)
    launch = Launch(image=None, layer=layer, binds=(), token=TRIAL, command=LOOK)

    def attempt(features: frozenset[Feature]) -> str:
        if Feature.overlay in features and version < (0, 11):
            return "bwrap before 0.11 has no --overlay"
        argv = bubblewrap_argv(path, launch, features=features)
        done = _trial(argv, environment=environment)
        return _judge(done, features)

    found, error = _climb(attempt)
    if found:
        found |= {Feature.user_namespace}
    return version, found, error


def _judge(done: subprocess.CompletedProcess[bytes], asked: frozenset[Feature]) -> str:
    """Empty when the trial ran and was given all it asked for; runtimes leave out what their
    configuration forbids without a word."""
    if done.returncode != 0:
        return _one_line(done.stderr, done.returncode)
    words = done.stdout.decode(errors="replace").split()
    had = set()
    for kind, feature in NAMESPACES.items():
        own = Path(f"/proc/self/ns/{kind}").readlink()
        if any(word.startswith(f"{kind}:") and word != str(own) for word in words):
            had.add(feature)
    if "written" in words:
        had.add(Feature.overlay)
    ignored = sorted(asked - had - {Feature.container})
    return f"{', '.join(ignored)} was asked for and not given" if ignored else ""


def _climb(attempt: Callable[[frozenset[Feature]], str]) -> tuple[frozenset[Feature], str]:
    """All at once; when that fails, the bare container and then each feature alone."""
    rungs = [name for name in Feature if name is not Feature.container]
    error = attempt(frozenset(rungs))
    if not error:
        return frozenset(Feature), ""
    bare = attempt(frozenset())
    if bare:
        # a runtime without setuid starter can do nothing without a user namespace
        bare = attempt(frozenset({Feature.user_namespace}))
        if bare:
            return frozenset(), bare
        base = frozenset({Feature.user_namespace})
    else:
        base = frozenset()
    found = {Feature.container, *base}
    errors = []
    for name in rungs:
        if name not in found:
            said = attempt(base | {name})
            if said:
                errors.append(said)
            else:
                found.add(name)
    return frozenset(found), "; ".join(dict.fromkeys(errors)) or error


def _trial(
    argv: Sequence[str], *, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[bytes]:
    """Runs one trial; what can't be started or doesn't end is a failed trial, not an error."""
    try:
        return subprocess.run(
            list(argv), env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True,
            timeout=PROBE_SECONDS, check=False, cwd="/",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as err:
        return subprocess.CompletedProcess(list(argv), 127, b"", str(err).encode())


def _one_line(stderr: bytes, code: int) -> str:
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"exit code {code}"
