"""From a spec to a command line: which sandbox holds the shell, and what it is made of.

Knows the backends' differences (mounts, paths, copies), and nothing of commands or time.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from hpc.container import (
    Features,
    Launch,
    bubblewrap_argv,
    container_argv,
    host_environment,
    resolve,
)
from hpc.isolation import Feature, Isolation
from prorl_hpc.environment.base import Backend, EnvironmentSpec, SandboxStartError
from prorl_hpc.environment.channel import shell_argv
from prorl_hpc.environment.processes import TOKEN_VARIABLE
from prorl_hpc.environment.scratch import Scratch

INBOX, OUTBOX = "/.prorl/in", "/.prorl/out"
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


def prepare(spec: EnvironmentSpec, *, features: Features, scratch: Scratch) -> Prepared:
    """Lays out the scratch and spells the command line. Blocking: copies for old bubblewraps.

    Raises IsolationError (the site lacks something) or SandboxStartError (this image, this node).
    """
    have, isolation = resolve(
        features, backend=spec.backend.value, accept_missing=spec.accept_missing
    )
    command = shell_argv(
        spec.limits, own_process_count=isolation.process_limit == "rlimit+watchdog"
    )
    environment = host_environment(scratch.path, base=os.environ)
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
        argv = container_argv(features.runtime, launch, features=have)
    else:
        assert features.bubblewrap is not None
        _lay_out(launch, overlay=Feature.overlay in have)
        argv = bubblewrap_argv(features.bubblewrap, launch, features=have)
    return Prepared(
        argv=argv, environment=environment, isolation=isolation, inbox=INBOX, outbox=OUTBOX,
        home=HOME,
    )  # fmt: skip


def _lay_out(launch: Launch, *, overlay: bool) -> None:
    """Makes what bubblewrap binds: overlay directories, or copies of the image's own."""
    try:
        if launch.image is not None and not launch.image.is_dir():
            raise SandboxStartError(
                f"image {launch.image} is a file; bubblewrap needs an unpacked directory "
                f"(apptainer build --sandbox DIRECTORY {launch.image})"
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
