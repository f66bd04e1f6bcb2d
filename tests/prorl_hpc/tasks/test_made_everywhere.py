"""Made problems are the same in every process: the rollouts of a group come from several nodes."""

import os
import subprocess
import sys

SOURCE = """
import hashlib, msgspec
from prorl_hpc.choices import AgentKind, EnvironmentKind
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind
from prorl_hpc.tasks.registry import make_task

options = {"level": [1, 5]}
cli = TaskConfig(kind="cli", agent=AgentKind.bash, environment=EnvironmentKind.bubblewrap,
                 options=options | {"parts": [1, 3]})
tools = TaskConfig(kind="tools", agent=AgentKind.tools, max_turns=8,
                   options=options | {"wishes": [1, 4]})
digest = hashlib.sha256()
for config in (cli, tools):
    task = make_task(config.kind, config, 5)
    for index in range(60):
        digest.update(msgspec.msgpack.encode(task.instance(index, kind=Kind.train)))
print(digest.hexdigest())
"""


def test_the_order_of_sets_decides_nothing() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", SOURCE], env=os.environ | {"PYTHONHASHSEED": seed}, text=True,
            capture_output=True, timeout=300,
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    assert len(runs[0].stdout.strip()) == 64
