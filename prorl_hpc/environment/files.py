"""Files into and out of a sandbox, through two directories that the host never trusts.

In: the host writes under a name of its own into a directory that is read-only inside; a command
copies it. Out: a command copies into the outbox; the host opens exactly that name, follows no
link, takes regular files only. Every path of the agent's is resolved inside the sandbox.
"""

import asyncio
import os
import posixpath
import secrets
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpc.errors import SandboxError
from prorl_hpc.environment.base import CommandResult, EnvironmentSpec, TransferError

TRANSFER_SECONDS = 120.0
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class Doors:
    """The directories, as the host and as the shell name them."""

    inbox_host: Path
    inbox: str
    outbox_host: Path
    outbox: str


class Shell(Protocol):
    """What of an environment is needed here."""

    spec: EnvironmentSpec

    @property
    def transfer(self) -> Doors: ...

    async def run(self, command: str | bytes, timeout_seconds: float) -> CommandResult: ...


async def put(shell: Shell, path: str, data: bytes) -> None:
    """Writes `data` to `path`. Raises TransferError, or SandboxError when the host has no room."""
    _check(path)
    doors, name = shell.transfer, secrets.token_hex(8)
    staged = doors.inbox_host / name
    try:
        await asyncio.to_thread(staged.write_bytes, data)
        target, parent = shlex.quote(path), shlex.quote(posixpath.dirname(path) or ".")
        await _inside(
            shell, f"put {path!r}",
            f"command mkdir -p -- {parent} && command cat <{doors.inbox}/{name} >{target}",
        )  # fmt: skip
    except OSError as err:
        if isinstance(err, TransferError):
            raise
        raise SandboxError(f"{staged}: {err.strerror}") from err
    finally:
        staged.unlink(missing_ok=True)


async def get(shell: Shell, path: str) -> bytes:
    """The bytes of the regular file `path`. Raises TransferError."""
    _check(path)
    source = shlex.quote(path)
    script = (
        f'[ -f {source} ] || {{ echo "no regular file" >&7; exit 1; }}; '
        f"command head -c {shell.spec.limits.transfer_bytes + 1} <{source}"
    )
    return await _fetch(shell, f"get {path!r}", script)


async def diff(shell: Shell, directory: str, base: str) -> bytes:
    """Everything that differs from `base`, new files too, as a binary git patch."""
    _check(directory)
    # an index of its own: the agent's staging area stays as it is
    script = (
        f"cd -- {shlex.quote(directory)} && unset ${{!GIT_*}} && "
        'GIT_INDEX_FILE=$(command mktemp) && export GIT_INDEX_FILE && rm -f "$GIT_INDEX_FILE" && '
        "git() { command git -c safe.directory='*' -c core.fsmonitor=false "
        "-c core.hooksPath=/dev/null -c core.autocrlf=false -c diff.noprefix=false "
        '-c diff.mnemonicPrefix=false "$@"; } && '
        f"git read-tree {shlex.quote(base)} && git add -A . >&2 && "
        "git diff --cached --binary --full-index --no-ext-diff --no-textconv --no-color "
        f'--no-renames {shlex.quote(base)} --; code=$?; rm -f "$GIT_INDEX_FILE"; exit "$code"'
    )
    return await _fetch(shell, f"diff {directory!r}", script)


async def _fetch(shell: Shell, what: str, script: str) -> bytes:
    doors, name = shell.transfer, secrets.token_hex(8)
    host = doors.outbox_host / name
    try:
        await _inside(shell, what, f"exec 7>&1 >{doors.outbox}/{name} 2>&7; {script}")
        limit = shell.spec.limits.transfer_bytes
        return await asyncio.to_thread(read_untrusted, host, what=what, limit_bytes=limit)
    finally:
        _remove(host)


async def _inside(shell: Shell, what: str, script: str) -> None:
    """Runs `script` in a subshell: options, functions and PATH of the agent's don't reach it."""
    clean = (
        f"(set +eux; PATH={SEARCH_PATH}; unset -f command cat mkdir head git rm mktemp; {script})"
    )
    result = await shell.run(clean, TRANSFER_SECONDS)
    if result.exit_code != 0:
        said = result.text.strip().splitlines()[-1:] or [f"exit code {result.exit_code}"]
        raise TransferError(f"{what}: {said[0][:300]}")


def read_untrusted(path: Path, *, what: str, limit_bytes: int) -> bytes:
    """Reads a file from a directory that an agent may write: no links, no devices, no surprises."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as err:
        raise TransferError(f"{what}: nothing came out ({err.strerror})") from err
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(descriptor)
        raise TransferError(f"{what}: not a plain file came out")
    with os.fdopen(descriptor, "rb") as stream:
        data = stream.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise TransferError(f"{what}: larger than transfer_bytes={limit_bytes}")
    return data


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # the agent put a directory there; it goes with the scratch


def _check(path: str) -> None:
    if not path or "\0" in path:
        raise TransferError(f"path {path!r} is empty or holds a NUL byte")
