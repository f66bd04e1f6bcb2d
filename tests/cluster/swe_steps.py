"""Every destructive script through a whole rollout node: `swe_steps.py ROOTFS`, as a user.

    script -> agent -> sandbox -> pipeline -> worker -> wire -> buffer -> trajectory on disk

Real containers, worker, buffer and shards; the model's words alone are scripted. Attacks run three
at a time beside a repair of the same bug. Prints one JSON object: by attack, what is in the buffer.
Attacks run inside a sandbox alone, under the limits of `LIMITS`.
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from prorl_hpc.agents.replay import DESTRUCTIVE, Replay, gold_script
from prorl_hpc.buffer.mixture import TaskShare
from prorl_hpc.buffer.reader import GroupReader
from prorl_hpc.choices import AgentKind, EnvironmentKind
from prorl_hpc.environment import EnvironmentFactory, processes
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.rollout.health import Health
from prorl_hpc.rollout.pipeline import Parts, Pipeline
from prorl_hpc.rollout.spool import Spool
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.rollout.worker import Terms, Worker
from prorl_hpc.tasks.swe.task import TREE, SweTask, open_swe
from tests.prorl_hpc.agents.templates import byte_tokenizer
from tests.prorl_hpc.buffer.buffer_helpers import Running, make_config, make_run
from tests.prorl_hpc.rollout.helpers import LocalScorer, make_recipe
from tests.prorl_hpc.tasks.swe_bug import make_store

COMMAND_SECONDS = 8.0
REPAIRS = ("repair", "repair afterwards")
"""Beside the attacks, and after all of them: the neighbour, and the worker that goes on."""

NAMES = (REPAIRS[0], *DESTRUCTIVE, REPAIRS[1])
LIMITS = {"num_processes": 64, "disk_bytes": 64 << 20, "memory_bytes": 1 << 30}


class Attacker:
    """The rollout's number chooses the script."""

    needs_environment = True

    def __init__(self, gold: bytes) -> None:
        self._gold = gold

    async def run(self, conversation: Any, *, messages: Any, environment: Any) -> None:
        name = NAMES[conversation.rollout_index]
        script = gold_script(self._gold, TREE) if name in REPAIRS else attack(name)
        replay = Replay(lambda *_: script, command_seconds=COMMAND_SECONDS)
        await replay.run(conversation, messages=messages, environment=environment)


def attack(name: str) -> list[str]:
    return [f"cd {TREE}", DESTRUCTIVE[name]]


def make_parts(root: Path, run: Any, task: SweTask, config: TaskConfig, make: Any) -> Parts:
    recipe = make_recipe(run_workers=3, init_workers=3, eval_workers=3, episode_seconds=600.0)
    recipe.tasks = {"swe": config}
    recipe.model.context_tokens = 20_000
    tokenizer = byte_tokenizer()
    engine = ScriptedEngine(tokenizer, lambda prompt, affinity: "ok")
    return Parts(
        recipe=recipe, tasks={"swe": task}, agents={"swe": Attacker(task.gold(task.bugs()[0]))},
        tokenizer=tokenizer, engine=engine, versions=Versions(engine, run=run),
        scorer=LocalScorer(task), make_environment=make, worker="rollout-0", attempt=1,
    )  # fmt: skip


async def attempt_all(root: Path, task: SweTask, config: TaskConfig) -> dict[str, str]:
    run = make_run(root / "run")
    factory = EnvironmentFactory(root / "scratch")
    shares = {"swe": TaskShare(weight=1.0, train_size=1)}
    buffer = Running(run, config=make_config(
        tasks=shares, num_rollouts=len(NAMES), batch_groups=1, min_usable=len(NAMES),
        max_staleness=0, max_infrastructure_retries=0, group_deadline_seconds=3600.0,
    ))  # fmt: skip
    learner = await asyncio.to_thread(buffer.learner)
    client = await buffer.rollout("rollout-0")
    taken: list[Any] = []
    parts = make_parts(root, run, task, config, factory.create)
    worker = Worker(
        client=client, pipeline=Pipeline(parts), versions=parts.versions,
        spool=Spool(root / "spool", limit_bytes=1 << 20), health=Health(),
        # one at a time in all stages together would hide what neighbours do to each other
        terms=Terms(capacity=3, heartbeat_seconds=5.0),
        stop_reason=lambda: "all is taken" if taken else "",
    )  # fmt: skip
    work = asyncio.create_task(worker.run())
    try:
        while not taken:
            assert not work.done(), work
            taken += await asyncio.to_thread(learner.take, 1, timeout_seconds=2.0)
        end = await work
        assert end.reason == "all is taken", end
        reader = GroupReader(run)
        group = reader.read(taken[0])
        reader.close()
    finally:
        work.cancel()
        await client.close()
        await asyncio.to_thread(learner.close)
        await asyncio.to_thread(buffer.stop)
        factory.close()
    left = [entry.name for entry in (root / "scratch").iterdir()]
    assert left == [], left
    told = dict.fromkeys(NAMES, "missing")
    for one in group.trajectories:
        told[NAMES[one.rollout_index]] = f"{one.outcome} {one.reward:g} {one.isolation['backend']}"
    return told


def main(rootfs: Path) -> dict[str, Any]:
    assert os.geteuid() != 0, "never as root"
    with tempfile.TemporaryDirectory(prefix="prorl-swe-", dir="/var/tmp") as name:
        root = Path(name)
        host = root / "of the host"
        host.write_text("untouched")
        store, data = make_store(root)
        config = TaskConfig(
            kind="swe", data=str(data), environment=EnvironmentKind.apptainer, validation_size=1,
            agent=AgentKind.bash, score_timeout_seconds=300.0,
            options={"store": str(store.root), "image": str(rootfs), "limits": LIMITS},
        )  # fmt: skip
        before = set(processes.snapshot())
        told = asyncio.run(attempt_all(root, open_swe("swe", config, usable_only=True), config))
        mine = [
            info.pid
            for info in processes.snapshot().values()
            if info.pid not in before and Path(f"/proc/{info.pid}").stat().st_uid == os.getuid()
        ]
        return {"told": told, "host": host.read_text(), "processes": mine}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
