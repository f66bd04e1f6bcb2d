"""Shell problems in real containers, without a model: `cli_steps.py ROOTFS`, as a user.

Every family is solved by its solution and not by nothing; a row of a data set is judged by its
scripts in a second container. Prints one JSON object: rewards by what was done.
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from prorl_hpc.choices import AgentKind, EnvironmentKind
from prorl_hpc.environment import EnvironmentFactory
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind, Score
from prorl_hpc.tasks.cli.task import CliTask, make_cli
from tests.prorl_hpc.tasks.cli_problems import OTHER, ROW, all_families

SECONDS = 120.0
TRICK = "ln -s /proc/self/cwd/b.txt b.txt"


async def attempt(factory: EnvironmentFactory, task: CliTask, instance: Any, line: str) -> Score:
    async with factory.create(task.environment_spec(instance)) as environment:
        await task.setup(instance, environment)
        await environment.run(line, SECONDS)
        result = await task.result(instance, environment)
    return await task.score_in(
        instance, result=result, response="", make_environment=factory.create
    )


async def attempts(root: Path, rootfs: Path) -> dict[str, list[float]]:
    factory = EnvironmentFactory(root / "scratch")
    made = all_families(EnvironmentKind.apptainer, image=rootfs)
    data = root / "cli.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in (ROW, OTHER)))
    config = TaskConfig(
        kind="cli", data=str(data), environment=EnvironmentKind.apptainer, agent=AgentKind.bash,
        validation_size=1, options={"image": str(rootfs), "reward": "fraction"},
    )  # fmt: skip
    own = make_cli("cli", config, 0)
    problems = [made.instance(n, kind=Kind.train) for n in range(made.size(Kind.train))]
    row = own.instance(0, kind=Kind.train)
    told: dict[str, list[float]] = {}
    try:
        told["solutions"] = [
            (await attempt(factory, made, one, one.answer.solution)).reward for one in problems
        ]
        told["nothing"] = [(await attempt(factory, made, problems[0], "true")).reward]
        for name, line in (("row", ROW["solution"]), ("row: nothing", "true"), ("trick", TRICK)):
            told[name] = [(await attempt(factory, own, row, str(line))).reward]
    finally:
        factory.close()
    return told


def main(rootfs: Path) -> dict[str, list[float]]:
    assert os.geteuid() != 0, "never as root"
    with tempfile.TemporaryDirectory(prefix="prorl-cli-", dir="/var/tmp") as name:
        return asyncio.run(attempts(Path(name), rootfs))


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
