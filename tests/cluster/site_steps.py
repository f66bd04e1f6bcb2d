"""What a site that lacks something gives: `site_steps.py BACKEND IMAGE [accept...]`, as a user.

Prints one JSON object: the refusal, or the isolation of an environment that really ran.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hpc.errors import IsolationError
from hpc.isolation import Feature
from prorl_hpc.environment import Backend, EnvironmentFactory, EnvironmentSpec


async def main(backend: str, image: str, *accepted: str) -> dict[str, object]:
    spec = EnvironmentSpec(
        backend=Backend(backend), image=Path(image),
        accept_missing=frozenset(Feature(one) for one in accepted),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="prorl-site-", dir="/var/tmp") as root:
        factory = EnvironmentFactory(Path(root) / "scratch")
        try:
            async with factory.create(spec) as environment:
                ran = await environment.run("touch /written; echo ran; readlink /proc/self/ns/net",
                                            60.0)  # fmt: skip
                return {"isolation": environment.isolation.to_json(), "said": ran.text.split()}
        except IsolationError as err:
            return {"refused": str(err)}
        finally:
            factory.close()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
