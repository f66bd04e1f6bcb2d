"""Latency of starting environments, 1, 8 and 32 at once, against the runtime's bare `exec`.

    python benchmarks/environment_start.py --directory ROOTFS [--sif IMAGE.sif] [--at-once 1,8,32]
        [--repeat 3] [--gate 4]

Run it as an ordinary user. Peer and limit: `apptainer exec IMAGE true` with the same image and no
isolation of ours, as many together as are asked for; a start of ours adds the isolation, a writable
layer, a shell that answers, and its clean end isn't counted. `--gate` is the node's start gate.
Without --directory, bubblewrap runs over the host's own /usr.
"""

import argparse
import asyncio
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpc.errors import HpcError, IsolationError
from prorl_hpc.environment import Backend, EnvironmentFactory, EnvironmentSpec

Start = Callable[[int], Awaitable[list[float]]]
"""So many at once -> seconds until each was ready."""


def ours(factory: EnvironmentFactory, spec: EnvironmentSpec) -> Start:
    """From `create` to a shell that answered; all live until the last is ready."""

    async def start(at_once: int) -> list[float]:
        ready = asyncio.Barrier(at_once)

        async def one() -> float:
            began = time.perf_counter()
            async with factory.create(spec):
                taken = time.perf_counter() - began
                await ready.wait()
            return taken

        return list(await asyncio.gather(*(one() for _ in range(at_once))))

    return start


def bare(argv: Sequence[str]) -> Start:
    """The program's own start and end."""

    async def start(at_once: int) -> list[float]:
        async def one() -> float:
            began = time.perf_counter()
            process = await asyncio.create_subprocess_exec(
                *argv, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
            )
            if await process.wait() != 0:
                raise HpcError(f"{' '.join(argv)} failed")
            return time.perf_counter() - began

        return list(await asyncio.gather(*(one() for _ in range(at_once))))

    return start


def candidates(
    factory: EnvironmentFactory, directory: Path | None, sif: Path | None
) -> dict[str, tuple[Start, str]]:
    """Name -> (how to start, name of the peer it is compared with)."""
    found: dict[str, tuple[Start, str]] = {}
    runtime = factory.features.runtime
    for kind, image in (("SIF", sif), ("directory", directory)):
        if image is None:
            continue
        if runtime is not None:
            peer = f"bare exec, {kind}"
            found[peer] = (bare([runtime.path, "-s", "exec", str(image), "true"]), peer)
            spec = EnvironmentSpec(backend=Backend.apptainer, image=image)
            found[f"apptainer, {kind}"] = (ours(factory, spec), peer)
    spec = EnvironmentSpec(backend=Backend.bubblewrap, image=directory)
    peer = "bare exec, directory" if directory is not None and runtime is not None else ""
    found["bubblewrap, directory" if directory else "bubblewrap, host"] = (
        ours(factory, spec),
        peer,
    )
    return found


async def measure(
    directory: Path | None, sif: Path | None, *, at_once: Sequence[int], repeat: int, gate: int
) -> None:
    print(f"{platform.node()}: Linux {platform.release()}, Python {platform.python_version()}")
    print(f"{'start':<24}{'at once':>9}{'median ms':>11}{'all after ms':>14}{'of bare':>9}")
    with tempfile.TemporaryDirectory(prefix="prorl-bench-", dir="/var/tmp") as root:
        factory = EnvironmentFactory(Path(root) / "scratch", max_concurrent_starts=gate)
        try:
            limits: dict[tuple[str, int], float] = {}
            for name, (start, peer) in candidates(factory, directory, sif).items():
                try:
                    await start(1)  # the image's pages are read once, for everybody
                except IsolationError as err:
                    print(f"{name:<24}{'-':>9}  {str(err)[:60]}")
                    continue
                for number in at_once:
                    rounds = [await start(number) for _ in range(repeat)]
                    last = statistics.median(max(taken) for taken in rounds)
                    middle = statistics.median(one for taken in rounds for one in taken)
                    if name == peer:
                        limits[peer, number] = last
                    limit = limits.get((peer, number))
                    share = f"{last / limit:>8.2f}x" if limit else f"{'-':>9}"
                    print(f"{name:<24}{number:>9}{middle * 1e3:>11.0f}{last * 1e3:>14.0f}{share}")
        finally:
            factory.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, help="unpacked root directory")
    parser.add_argument("--sif", type=Path, help="the same image as one file")
    parser.add_argument("--at-once", default="1,8,32")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--gate", type=int, default=4, help="starts at once on the node (4)")
    given = parser.parse_args()
    try:
        numbers = [int(word) for word in given.at_once.split(",")]
        asyncio.run(
            measure(
                given.directory, given.sif, at_once=numbers, repeat=given.repeat, gate=given.gate
            )
        )
    except (HpcError, ValueError) as err:
        print(err, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
