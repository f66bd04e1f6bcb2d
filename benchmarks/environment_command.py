"""Latency of one command in a live environment, against a bare bash pipe.

The peer is a bash process whose stdin and stdout are pipes, driven by blocking reads and writes:
nothing that keeps a shell alive can be faster. Target: at most 2 ms over it at the median.

    python benchmarks/environment_command.py [--image IMAGE.sif|DIRECTORY] [--commands 300]

Run it as an ordinary user. Without --image, bubblewrap runs over the host's own /usr.
"""

import argparse
import asyncio
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpc.errors import HpcError, IsolationError
from hpc.isolation import Feature
from prorl_hpc.environment import Backend, EnvironmentFactory, EnvironmentSpec

COMMAND = "echo hello"


def quantile(seconds: Sequence[float], share: float) -> float:
    """In milliseconds."""
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))] * 1e3


def bare_pipe(num_commands: int) -> list[float]:
    """The physical limit: write a line, read a line."""
    taken = []
    with subprocess.Popen(["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdin and shell.stdout
        for _ in range(num_commands):
            began = time.perf_counter()
            shell.stdin.write(COMMAND.encode() + b"\n")
            shell.stdin.flush()
            shell.stdout.readline()
            taken.append(time.perf_counter() - began)
        shell.stdin.close()
    return taken


async def live(factory: EnvironmentFactory, spec: EnvironmentSpec, count: int) -> list[float]:
    taken = []
    async with factory.create(spec) as environment:
        for _ in range(count):
            began = time.perf_counter()
            result = await environment.run(COMMAND, 60.0)
            taken.append(time.perf_counter() - began)
            assert result.output == b"hello\n", result
    return taken


def specs(image: Path | None) -> dict[str, EnvironmentSpec]:
    made = {
        "process": EnvironmentSpec(
            backend=Backend.process, image=None, accept_missing=frozenset(Feature)
        )
    }
    directory = image if image is not None and image.is_dir() else None
    if image is None or directory is not None:
        made["bubblewrap"] = EnvironmentSpec(backend=Backend.bubblewrap, image=directory)
    if image is not None:
        kind = "directory" if directory else "SIF"
        made[f"apptainer, {kind}"] = EnvironmentSpec(backend=Backend.apptainer, image=image)
    return made


async def measure(image: Path | None, num_commands: int) -> None:
    bare = bare_pipe(num_commands)
    print(f"{platform.node()}: Linux {platform.release()}, Python {platform.python_version()}")
    print(f"\n{'command latency':<24}{'p50 ms':>9}{'p99 ms':>9}{'over bare':>11}")
    print(f"{'bare bash pipe':<24}{quantile(bare, 0.5):>9.3f}{quantile(bare, 0.99):>9.3f}")
    with tempfile.TemporaryDirectory(prefix="prorl-bench-", dir="/var/tmp") as root:
        factory = EnvironmentFactory(Path(root) / "scratch")
        for name, spec in specs(image).items():
            try:
                factory.check(spec)
            except IsolationError as err:
                print(f"{name:<24}{'-':>9}  {str(err)[:60]}")
                continue
            taken = await live(factory, spec, num_commands)
            over = quantile(taken, 0.5) - quantile(bare, 0.5)
            print(f"{name:<24}{quantile(taken, 0.5):>9.3f}{quantile(taken, 0.99):>9.3f}"
                  f"{over:>+11.3f}")  # fmt: skip
        factory.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--image", type=Path)
    parser.add_argument("--commands", type=int, default=300)
    arguments = parser.parse_args()
    try:
        asyncio.run(measure(arguments.image, arguments.commands))
    except (HpcError, ValueError) as err:
        print(err, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
