"""Where a run came from: versions, commit, host, command line. Reads the machine only."""

import getpass
import importlib.metadata
import json
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from prorl_hpc import __version__

FORMAT = 1
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "tokenizers",
    "vllm",
    "numpy",
    "h5py",
    "pyzmq",
    "msgspec",
    "hydra-core",
    "submitit",
    "spython",
    "math-verify",
    "reasoning-gym",
)


def provenance(argv: Sequence[str], *, overrides: Sequence[str]) -> str:
    """JSON text of what made this run; unknown facts are null, never an error."""
    facts = {
        "format": FORMAT,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["prorl-hpc", *argv]),
        "overrides": list(overrides),
        "directory": str(Path.cwd()),
        "host": socket.gethostname(),
        "user": _user(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "prorl_hpc": __version__,
        "git": _git(Path(__file__).resolve().parent.parent),
        "packages": {name: _version(name) for name in PACKAGES},
    }
    return json.dumps(facts, indent=2) + "\n"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None


def _git(checkout: Path) -> dict[str, object] | None:
    """Commit of the checkout that the code runs from; None for an installed wheel."""
    if not (checkout / ".git").exists():
        return None
    commit = _run_git(checkout, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _run_git(checkout, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changed is None else bool(changed)}


def _run_git(checkout: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
