"""From a spec to a command line: which sandbox holds the shell, and what it is made of.

Knows the backends' differences (mounts, paths, copies), and nothing of commands or time.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpc.cgroups import group_paths, make_group, scope_argv
from hpc.container import (
    Features,
    Launch,
    bubblewrap_argv,
    container_argv,
    host_environment,
    resolve,
)
from hpc.isolation import Feature, Isolation
from prorl_hpc.environment.base import Backend, EnvironmentSpec, Limits, SandboxStartError
from prorl_hpc.environment.channel import THREAD_ALLOWANCE, shell_argv
from prorl_hpc.environment.processes import GROUPS_FILE, TOKEN_VARIABLE
from prorl_hpc.environment.scratch import Scratch

INBOX, OUTBOX = "/.prorl/in", "/.prorl/out"
BUS_VARIABLES = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
"""What systemd-run itself needs; the sandboxes clear their environment."""

HOME = "/tmp/home"  # noqa: S108 - inside the sandbox


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Everything that starting, and starting again, needs."""

    argv: list[str]
    environment: Mapping[str, str]
    isolation: Isolation
    inbox: str
    """As the shell names it."""
    outbox: str
    home: str
    groups: tuple[Path, ...] = ()
    """Control groups that hold the whole sandbox; made here, removed with its processes."""


def prepare(spec: EnvironmentSpec, *, features: Features, scratch: Scratch) -> Prepared:
    """Lays out the scratch and spells the command line. Blocking: copies for old bubblewraps.

    Raises IsolationError (the site lacks something) or SandboxStartError (this image, this node).
    """
    have, isolation = resolve(
        features, backend=spec.backend.value, accept_missing=spec.accept_missing
    )
    command = shell_argv(
        spec.limits, own_process_count="rlimit" in isolation.process_limit.split("+")
    )
    environment = host_environment(scratch.path, base=os.environ)
    prepared = _prepare(
        spec, features=features, have=have, isolation=isolation, scratch=scratch, command=command,
        environment=environment,
    )  # fmt: skip
    return _limited(prepared, spec.limits, features=features, scratch=scratch)


def _limited(
    prepared: Prepared, limits: Limits, *, features: Features, scratch: Scratch
) -> Prepared:
    """The same, in a control group or a scope, where the machine gives one."""
    processes = limits.num_processes + THREAD_ALLOWANCE
    if features.groups is not None:
        groups = group_paths(features.groups, f"prorl-{scratch.token}")
        try:
            # before they are there: whoever cleans up must know of them
            (scratch.path / GROUPS_FILE).write_text("".join(f"{group}\n" for group in groups))
            make_group(
                features.groups, groups, memory_bytes=limits.memory_bytes, num_processes=processes
            )
        except OSError as err:
            raise SandboxStartError(f"control group {groups[0]} can't be made: {err}") from err
        return replace(prepared, groups=groups)
    if features.scope_runner is not None:
        prefix = scope_argv(
            features.scope_runner, memory_bytes=limits.memory_bytes, num_processes=processes
        )
        bus = {name: os.environ[name] for name in BUS_VARIABLES if name in os.environ}
        return replace(
            prepared, argv=[*prefix, *prepared.argv], environment={**prepared.environment, **bus}
        )
    return prepared


def _prepare(
    spec: EnvironmentSpec, *, features: Features, have: frozenset[Feature], isolation: Isolation,
    scratch: Scratch, command: list[str], environment: dict[str, str],
) -> Prepared:  # fmt: skip
    if spec.backend is Backend.process:
        home = scratch.layer / "home"
        home.mkdir()
        return Prepared(
            argv=[shutil.which("bash") or "/bin/bash", *command[1:]],
            environment=environment | {TOKEN_VARIABLE: scratch.token, "HOME": str(home)},
            isolation=isolation, inbox=str(scratch.inbox), outbox=str(scratch.outbox),
            home=str(home),
        )  # fmt: skip
    if spec.image is not None and not spec.image.exists():
        raise SandboxStartError(f"image {spec.image} is missing on this node")
    launch = Launch(
        image=spec.image, layer=scratch.layer, token=scratch.token, command=command,
        binds=(
            *((host, inside, False) for host, inside in spec.binds),
            (scratch.inbox, INBOX, False), (scratch.outbox, OUTBOX, True),
        ),
        writable=tuple(dict.fromkeys(path for path in (*spec.writable, spec.directory)
                                     if not f"{path}/".startswith("/tmp/"))),  # noqa: S108
    )  # fmt: skip
    if spec.backend is Backend.apptainer:
        assert features.runtime is not None  # resolve refused otherwise
        if Feature.overlay not in have and not features.tmpfs_layer:
            _lay_out(launch, overlay=False)
        argv = container_argv(features.runtime, launch, features=have, tmpfs=features.tmpfs_layer)
    else:
        assert features.bubblewrap is not None
        _lay_out(launch, overlay=Feature.overlay in have)
        argv = bubblewrap_argv(features.bubblewrap, launch, features=have)
    return Prepared(
        argv=argv, environment=environment, isolation=isolation, inbox=INBOX, outbox=OUTBOX,
        home=HOME,
    )  # fmt: skip


def _lay_out(launch: Launch, *, overlay: bool) -> None:
    """Makes what is bound: overlay directories, or copies of the image's own."""
    try:
        if launch.image is not None and not launch.image.is_dir():
            raise SandboxStartError(
                f"image {launch.image} is a file; this sandbox needs an unpacked directory "
                f"(prorl-hpc images unpack, or apptainer build --sandbox DIRECTORY {launch.image})"
            )
        if overlay and launch.image is not None:
            for name in ("upper", "work"):
                (launch.layer / name).mkdir(exist_ok=True)
            return
        for inside in ("tmp", *launch.writable):
            target = launch.layer / inside.strip("/")
            source = launch.image / inside.strip("/") if launch.image else None
            if source is not None and source.is_dir() and inside != "tmp":
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
            target.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise SandboxStartError(f"layer {launch.layer} can't be made: {err}") from err
