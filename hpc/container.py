"""Rootless container command lines, and what of them works on this machine.

Knows the spellings of Apptainer (>= 1.2), SingularityCE (>= 3.11) and bubblewrap, and the ladder
of isolation features. Pure: `hpc.container_probe` finds out what works. Knows nothing of shells,
images' contents or learning. Values never travel through argv.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc.cgroups import GroupPlace
from hpc.errors import ImageError, IsolationError
from hpc.isolation import Feature, Isolation

MINIMUM_VERSIONS = {"apptainer": (1, 2), "singularity": (3, 11)}

FIXES: Mapping[Feature, str] = {
    Feature.container: "install Apptainer >= 1.2 (or bubblewrap for environment=bubblewrap)",
    Feature.user_namespace: (
        "sysctl user.max_user_namespaces=15000 (Debian: kernel.unprivileged_userns_clone=1; "
        "Ubuntu 23.10 and later: kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor "
        "profile that allows userns for the runtime)"
    ),
    Feature.pid_namespace: "'allow pid ns = yes' in apptainer.conf",
    Feature.network_none: (
        "sysctl user.max_net_namespaces=15000, and in apptainer.conf 'allow net networks' must "
        "not exclude 'none'"
    ),
    Feature.overlay: (
        "'enable overlay = yes' in apptainer.conf, kernel >= 5.11 or fuse-overlayfs, and "
        "/dev/fuse with mode 0666"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """A container runtime found on this machine."""

    flavour: str
    """`apptainer` or `singularity` (SingularityCE)."""
    path: str
    version: tuple[int, ...]
    version_text: str

    @property
    def is_supported(self) -> bool:
        """Old versions lack the spellings used here."""
        return self.version >= MINIMUM_VERSIONS[self.flavour]

    @property
    def directory_flag(self) -> str:
        """SingularityCE 3 knows only the old spelling of --cwd."""
        return "--cwd" if self.flavour == "apptainer" else "--pwd"


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """What was found to work, by trying it."""

    runtime: Runtime | None
    container: frozenset[Feature]
    """Features of the runtime; empty when it can't start anything."""
    container_error: str = ""
    """What the runtime said when a trial failed; one line."""
    tmpfs_layer: bool = True
    """Whether the runtime gives a writable layer in memory where it gives no overlay."""
    bubblewrap: str | None = None
    bubblewrap_version: tuple[int, ...] = ()
    bubblewrap_features: frozenset[Feature] = frozenset()
    bubblewrap_error: str = ""
    kernel: tuple[int, ...] = (0,)
    groups: GroupPlace | None = None
    """Where control groups may be made; None: nothing is delegated to this user."""
    scope_runner: str | None = None
    """`systemd-run`, where the user's own manager gives scopes with limits."""

    @property
    def limiter(self) -> str:
        """What bounds a whole sandbox in the kernel; empty: nothing does."""
        if self.groups is not None:
            return self.groups.name
        return "systemd-scope" if self.scope_runner is not None else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One sandbox to start: what is mounted where, and the command in it."""

    image: Path | None
    layer: Path
    """Directory on node-local disk that takes the writable layer."""
    binds: Sequence[tuple[Path, str, bool]]
    """(host, inside, writable)."""
    token: str
    """Marks the processes inside; not a secret."""
    command: Sequence[str]
    writable: Sequence[str] = ()
    """Only without an overlay: directories inside that are replaced by copies in the layer."""


def host_environment(scratch: Path, *, base: Mapping[str, str]) -> dict[str, str]:
    """Environment of the runtime's own process: nothing of the user's reaches the sandbox.

    APPTAINER_*, SINGULARITY_* and *ENV_ variables would change mounts and variables inside.
    """
    kept = {name: base[name] for name in ("PATH", "HOME", "USER", "LOGNAME") if name in base}
    cache = str(scratch)
    return kept | {
        "LANG": "C.UTF-8", "TMPDIR": cache,
        "APPTAINER_TMPDIR": cache, "SINGULARITY_TMPDIR": cache,
    }  # fmt: skip


def container_argv(
    runtime: Runtime, launch: Launch, *, features: frozenset[Feature], tmpfs: bool = True
) -> list[str]:
    """`apptainer exec` with every isolation of `features`, and the others left out.

    Without overlay the layer is in memory, or (`tmpfs=False`) the image stays read-only and the
    directories of `launch.writable` are bound over it.

    Raises ValueError for paths that the runtime's --bind can't spell.
    """
    if launch.image is None:
        raise ImageError("image=null: an Apptainer environment needs an image; name a SIF file")
    # --containall would imply --pid, so it is spelled out
    argv = [runtime.path, "-s", "exec", "--contain", "--ipc", "--cleanenv", "--no-home"]
    argv += ["--no-mount", "tmp,bind-paths"]
    if Feature.user_namespace in features:
        argv += ["--userns"]
    if Feature.pid_namespace in features:
        argv += ["--pid"]
    if Feature.network_none in features:
        argv += ["--net", "--network", "none"]
    if Feature.overlay in features:
        argv += ["--overlay", _spellable(launch.layer)]
    elif tmpfs:
        argv += ["--writable-tmpfs"]
    else:
        for inside in ("/tmp", *launch.writable):  # noqa: S108 - inside the sandbox
            argv += ["--bind", f"{_spellable(launch.layer / inside.strip('/'))}:{inside}:rw"]
    for host, inside, writable in launch.binds:
        argv += ["--bind", f"{_spellable(host)}:{inside}:{'rw' if writable else 'ro'}"]
    argv += ["--env", f"PRORL_SANDBOX={launch.token}", runtime.directory_flag, "/"]
    return [*argv, str(launch.image), *launch.command]


def bubblewrap_argv(
    path: str, launch: Launch, *, features: frozenset[Feature], shm_bytes: int = 64 << 20
) -> list[str]:
    """`bwrap` over an unpacked root directory, or over the host's own /usr when there is none."""
    argv = [path, "--die-with-parent", "--new-session", "--unshare-user", "--unshare-ipc"]
    argv += ["--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL"]
    if Feature.pid_namespace in features:
        argv += ["--unshare-pid"]
    if Feature.network_none in features:
        argv += ["--unshare-net"]
    argv += _bubblewrap_root(launch, overlay=Feature.overlay in features)
    argv += ["--proc", "/proc", "--dev", "/dev", "--size", str(shm_bytes), "--tmpfs", "/dev/shm"]  # noqa: S108
    for host, inside, writable in launch.binds:
        argv += ["--bind" if writable else "--ro-bind", str(host), inside]
    argv += ["--remount-ro", "/dev", "--chdir", "/", "--clearenv"]
    argv += ["--setenv", "PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
    return [*argv, "--setenv", "PRORL_SANDBOX", launch.token, *launch.command]


def _bubblewrap_root(launch: Launch, *, overlay: bool) -> list[str]:
    """Root file system: an overlay, or a read-only tree with copied directories bound over it."""
    copies: list[str] = []
    for inside in ("/tmp", *launch.writable):  # noqa: S108 - inside the sandbox
        copies += ["--bind", str(launch.layer / inside.strip("/")), inside]
    if launch.image is None:
        argv = ["--tmpfs", "/"]
        for name in ("usr", "bin", "sbin", "lib", "lib64", "lib32", "etc/alternatives",
                     "etc/ld.so.cache", "etc/ssl/certs", "etc/passwd", "etc/group"):  # fmt: skip
            host = Path("/") / name
            if host.is_symlink():
                argv += ["--symlink", str(host.readlink()), f"/{name}"]
            elif host.exists():
                argv += ["--ro-bind", str(host), f"/{name}"]
        return [*argv, "--dir", "/var/tmp", *copies]  # noqa: S108
    if overlay:
        upper, work = launch.layer / "upper", launch.layer / "work"
        return ["--overlay-src", str(launch.image), "--overlay", str(upper), str(work), "/"]
    # bind points can't be made in a read-only tree: its top level is laid out anew
    argv = ["--tmpfs", "/"]
    for entry in sorted(launch.image.iterdir()):
        inside = f"/{entry.name}"
        if entry.is_symlink():
            argv += ["--symlink", str(entry.readlink()), inside]
        elif entry.is_dir() and entry.name not in ("proc", "dev", "sys", "tmp"):
            argv += ["--ro-bind", str(entry), inside]
    return [*argv, *copies]


def _spellable(path: Path) -> str:
    text = str(path)
    if ":" in text or "," in text:
        raise ValueError(f"path {text!r} holds ':' or ',', which --bind can't spell; rename it")
    return text


def resolve(
    features: Features, *, backend: str, accept_missing: frozenset[Feature] = frozenset()
) -> tuple[frozenset[Feature], Isolation]:
    """The features to use and the record of them.

    Raises IsolationError, with the admin's fix, for each feature that is neither to be had nor
    among `accept_missing`.
    """
    if backend == "process":
        _refuse(frozenset(Feature), accept_missing & {Feature.container} and frozenset(Feature), "")
        return frozenset(), _record("process", "", frozenset(), tuple(sorted(Feature)), features)
    if backend == "apptainer":
        have, error = features.container, features.container_error
        runtime = features.runtime
        name = runtime.flavour if runtime else "apptainer"
        version = runtime.version_text if runtime else ""
    else:
        have, error, name = features.bubblewrap_features, features.bubblewrap_error, backend
        version = ".".join(str(number) for number in features.bubblewrap_version)
    if Feature.container not in have:
        usable = features.runtime is not None and features.runtime.is_supported
        if backend == "bubblewrap":
            usable = features.bubblewrap is not None
        cause = Feature.user_namespace if usable else Feature.container
        _refuse(frozenset({Feature.container}), frozenset(), error, fix=FIXES[cause])
    wanted = frozenset(Feature)
    if backend == "bubblewrap":
        wanted -= {Feature.overlay}  # copied directories do as well
    missing = wanted - have
    _refuse(missing, accept_missing, error)
    return have, _record(name, version, have, tuple(sorted(missing)), features)


def _refuse(
    missing: frozenset[Feature], accepted: frozenset[Feature], error: str, *, fix: str = ""
) -> None:
    """With `fix` nothing could be accepted instead: no container starts at all."""
    refused = sorted(missing - accepted)
    if not refused:
        return
    said = f" ({error})" if error else ""
    fixes = fix or "; ".join(f"{name}: {FIXES[name]}" for name in refused)
    what = f"isolation {', '.join(refused)} is not to be had on this machine{said}. "
    if fix:
        raise IsolationError(f"{what}Ask the admin: {fixes}")
    raise IsolationError(
        f"{what}Ask the admin: {fixes}. Or accept the weaker isolation, which every trajectory "
        f"then records: accept_missing=[{','.join(refused)}]"
    )


def _record(
    backend: str, version: str, have: frozenset[Feature], missing: tuple[Feature, ...],
    features: Features,
) -> Isolation:  # fmt: skip
    layer = "overlay" if Feature.overlay in have else "tmpfs"
    copies = backend == "bubblewrap" or not features.tmpfs_layer
    if copies and Feature.overlay not in have:
        layer = "copied-directories"
    if backend == "process":
        layer = "host"
    # since 5.14 RLIMIT_NPROC counts inside the user namespace, not the user's whole machine
    own_count = Feature.user_namespace in have and features.kernel >= (5, 14)
    kernel = [features.limiter] if features.limiter else []
    return Isolation(
        backend=backend,
        runtime_version=version,
        user_namespace=Feature.user_namespace in have,
        pid_namespace=Feature.pid_namespace in have,
        network_none=Feature.network_none in have,
        own_root=Feature.container in have,
        writable_layer=layer,
        memory_limit="+".join([*kernel, "rlimit", "watchdog"]),
        process_limit="+".join([*kernel, *(["rlimit"] if own_count else []), "watchdog"]),
        overridden=tuple(str(name) for name in missing),
    )
