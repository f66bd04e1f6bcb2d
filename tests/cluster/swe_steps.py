"""Every destructive script as an agent of recipe=swe: `swe_steps.py ROOTFS`, as an ordinary user.

Prints one JSON object: by attack, what its attempt came to. Attacks run inside a sandbox alone.
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from prorl_hpc.agents.replay import DESTRUCTIVE
from prorl_hpc.environment import EnvironmentEnded, EnvironmentFactory
from prorl_hpc.recipe import EnvironmentKind, TaskConfig
from prorl_hpc.tasks.swe.task import open_swe
from tests.prorl_hpc.tasks.swe_bug import make_store

COMMAND_SECONDS = 8.0


async def attempt(task: object, factory: EnvironmentFactory, attack: str) -> str:
    """The outcome, as the pipeline would have it."""
    bug = task.bugs()[0]  # type: ignore[attr-defined]
    instance = task.instance_of(bug)  # type: ignore[attr-defined]
    try:
        spec = task.environment_spec(instance)  # type: ignore[attr-defined]
        async with factory.create(spec) as environment:
            await task.setup(instance, environment)  # type: ignore[attr-defined]
            await environment.run(f"cd /testbed; {attack}", COMMAND_SECONDS)
            result = await task.result(instance, environment)  # type: ignore[attr-defined]
    except EnvironmentEnded as err:
        return f"ended: {err.reason}"
    score = await task.score_in(  # type: ignore[attr-defined]
        instance, result=result, response="", make_environment=factory.create
    )
    return f"{score.outcome} {score.reward:g}"


def main(rootfs: Path) -> dict[str, str]:
    assert os.geteuid() != 0, "never as root"
    with tempfile.TemporaryDirectory(prefix="prorl-swe-", dir="/var/tmp") as name:
        root = Path(name)
        store, data = make_store(root)
        config = TaskConfig(
            kind="swe", data=str(data), environment=EnvironmentKind.apptainer, validation_size=1,
            score_timeout_seconds=300.0, options={"store": str(store.root), "image": str(rootfs)},
        )  # fmt: skip
        task = open_swe("swe", config, usable_only=True)

        async def work() -> dict[str, str]:
            factory = EnvironmentFactory(root / "scratch")
            try:
                return {k: await attempt(task, factory, v) for k, v in DESTRUCTIVE.items()}
            finally:
                factory.close()

        return asyncio.run(work())


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
