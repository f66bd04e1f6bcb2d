"""One session of an admin with a real runtime, run as an ordinary user: `image_steps.py ROOTFS`.

Prints one JSON object of what happened; the test looks at it.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hpc.container_probe import find_runtime
from hpc.errors import ImageError
from hpc.files import asset_directory
from hpc.images import ImageStore
from hpc.images_build import build_image, import_image, unpack_image
from prorl_hpc.environment import (
    Backend,
    EnvironmentFactory,
    EnvironmentSpec,
    SandboxStartError,
)


async def say(factory: EnvironmentFactory, image: Path, command: str) -> str:
    spec = EnvironmentSpec(backend=Backend.apptainer, image=image)
    async with factory.create(spec) as environment:
        return (await environment.run(command, 60.0)).text.strip()


def failure(step: object) -> str:
    try:
        step()  # type: ignore[operator]
    except (ImageError, SandboxStartError) as err:
        return f"{type(err).__name__}: {err}"
    return ""


def killed_build(store: ImageStore, rootfs: Path, root: Path) -> list[str]:
    """`kill -9` of a whole builder in the middle; returns what is left in the store."""
    child = os.fork()
    if child == 0:
        slow = ImageStore(store.root, scratch=root / "scratch")
        os.setpgid(0, 0)
        slow.ensure("killed", source="s", source_key="k", make=lambda _path: time.sleep(600))
        os._exit(0)
    lease = store.root / ".leases" / "killed.lease"
    end = time.monotonic() + 300
    while not lease.exists() and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    old = time.time() - 3600
    os.utime(lease, (old, old))  # an hour without a heartbeat
    import_image(store, "killed", source=rootfs, runtime=find_runtime())
    return sorted(entry.name for entry in store.root.iterdir())


def main(rootfs: Path) -> dict[str, object]:
    runtime = find_runtime()
    told: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="prorl-images-", dir="/var/tmp") as name:
        root = Path(name)
        (root / "store").mkdir()
        store = ImageStore(root / "store", scratch=root / "scratch")
        factory = EnvironmentFactory(root / "sandboxes")

        def ask(_number: int) -> str:
            own = ImageStore(root / "store", scratch=root / "scratch")
            return import_image(own, "base", source=rootfs, runtime=runtime).sha256

        with ThreadPoolExecutor(4) as pool:
            told["digests"] = len(set(pool.map(ask, range(4))))
        swe = asset_directory("singularity") / "swe.def"
        build_image(store, "swe", definition=swe, runtime=runtime)
        told["verified"] = [entry.problem for entry in store.verify_all()]
        told["swe"] = asyncio.run(say(factory, store.path("swe"), "cd /testbed && git --version"))
        unpacked = unpack_image(store, "swe", cache=root / "cache", runtime=runtime)
        told["unpacked"] = asyncio.run(say(factory, unpacked, "ls -d /testbed"))
        broken = root / "broken.def"
        broken.write_text(
            "Bootstrap: localimage\nFrom: base.sif\n%post\n  echo last words; exit 3\n"
        )
        told["failed"] = failure(lambda: build_image(
            store, "broken", definition=broken, runtime=runtime))  # fmt: skip
        told["killed"] = killed_build(store, rootfs, root)
        sif = store.path("swe")
        sif.write_bytes(sif.read_bytes()[: 1 << 20])
        told["truncated"] = failure(lambda: store.verify("swe"))
        told["started"] = failure(lambda: asyncio.run(say(factory, sif, "true")))
        told["scratch"] = sorted(entry.name for entry in (root / "scratch").iterdir())
        factory.close()
    return told


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
