"""mini-swe-agent from PyPI on a real bug: `harness_steps.py ROOTFS PACKAGE STORE`, as a user.

The model is a script: its answers mend the bug, or hand in nothing. Prints one JSON object.
"""

import asyncio
import base64
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hpc.files import asset_directory
from prorl_hpc.agents.registry import make_agent
from prorl_hpc.agents.tools import spell_call
from prorl_hpc.choices import AgentKind, EnvironmentKind
from prorl_hpc.environment import EnvironmentFactory
from prorl_hpc.inference.engine import EngineError
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.recipe import HarnessConfig, ModelConfig, Recipe, RolloutConfig, TaskConfig
from prorl_hpc.records import Kind, Lease, Trajectory
from prorl_hpc.rollout.pipeline import Parts, Pipeline
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.run import Run
from prorl_hpc.tasks.pypi_bugs import BuildError, build_pypi
from prorl_hpc.tasks.swe.task import SweTask, open_swe
from tests.prorl_hpc.agents.templates import byte_tokenizer

BUG = "xmltodict-1.0.3"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
LOOK = "cat /proc/net/dev | tail -n +3 | cut -d: -f1; git -C /testbed status --short"


class Script(ScriptedEngine):
    """Plays one list of answers per attempt, and remembers what was asked."""

    def __init__(self, tokenizer: Any, scripts: dict[str, list[str]]) -> None:
        super().__init__(tokenizer, self._say)
        self.scripts = scripts
        self.prompts: dict[str, list[tuple[int, ...]]] = {}

    def _say(self, prompt_ids: tuple[int, ...], affinity: str) -> str:
        asked = self.prompts.setdefault(affinity, [])
        asked.append(prompt_ids)
        answers = self.scripts[affinity]
        if len(asked) > len(answers):
            raise EngineError("the harness asks for more than was expected")
        return answers[len(asked) - 1]


def answer(command: str) -> str:
    return f"I go on.\n{spell_call('bash', {'command': command})}"


def recipe_of(data: Path, store: Path, rootfs: Path, package: Path) -> Recipe:
    harness = HarnessConfig(
        command=["mini", "--yolo", "--exit-immediately", "--model", "openai/policy",
                 "--task", "{problem}", "--output", "/tmp/mini.json"],
        package=str(package),
        variables={
            "MSWEA_CONFIGURED": "true", "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini",
            "MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LC_ALL": "C",
        },
    )  # fmt: skip
    task = TaskConfig(
        kind="swe", data=str(data), agent=AgentKind.harness, harness=harness, max_turns=9,
        environment=EnvironmentKind.apptainer, validation_size=1, score_timeout_seconds=800.0,
        options={"store": str(store), "image": str(rootfs)},
    )  # fmt: skip
    return Recipe(
        name="harness", steps=1, tasks={"swe": task},
        model=ModelConfig(context_tokens=200_000),
        rollout=RolloutConfig(max_new_tokens=100_000, episode_seconds=800.0),
    )  # fmt: skip


def told(trajectory: Trajectory, engine: Script, tokenizer: Any) -> dict[str, Any]:
    sampled = trajectory.tokens[trajectory.loss_mask == 1]
    prompts = engine.prompts.get(f"0-{trajectory.rollout_index}", [])
    return {
        "outcome": str(trajectory.outcome), "reward": trajectory.reward,
        "finish": trajectory.finish_reason, "detail": trajectory.detail,
        "components": trajectory.components, "network": trajectory.isolation.get("network_none"),
        "sampled": tokenizer.decode(sampled, skip_special_tokens=True),
        "whole": tokenizer.decode(trajectory.tokens),
        "prompts_are_prefixes": all(
            tuple(trajectory.tokens[: len(ids)]) == ids for ids in prompts
        ),
        "timings": trajectory.timings,
    }  # fmt: skip


async def work(recipe: Recipe, task: SweTask, root: Path, scripts: list[list[str]]) -> Any:
    tokenizer = byte_tokenizer()
    engine = Script(tokenizer, {f"0-{i}": script for i, script in enumerate(scripts)})
    factory = EnvironmentFactory(root / "scratch")
    parts = Parts(
        recipe=recipe, tasks={"swe": task},
        agents={"swe": make_agent(recipe.tasks["swe"], tokenizer=tokenizer)},
        tokenizer=tokenizer, engine=engine, versions=Versions(engine, run=Run(root / "run")),
        scorer=None, make_environment=factory.create, worker="here", attempt=1,
    )  # type: ignore[arg-type]  # fmt: skip
    pipeline = Pipeline(parts)
    lease = Lease(
        lease_id=1, group_id=0, kind=Kind.validation, task="swe", instance_index=0,
        rollouts=tuple(range(len(scripts))), num_rollouts=len(scripts), seed=3,
        policy_version=None, deadline_seconds=900.0,
    )  # fmt: skip
    try:
        made = await asyncio.gather(*(pipeline.produce(lease, i) for i in lease.rollouts))
    finally:
        factory.close()
    return [told(trajectory, engine, tokenizer) for trajectory in made]


def main(rootfs: Path, package: Path, root: Path) -> Any:
    assert os.geteuid() != 0, "never as root"
    lines = (asset_directory("recipes") / "data/pypi_bugs.jsonl").read_text().splitlines()
    row = next(line for line in lines if json.loads(line)["instance_id"] == BUG)
    again = json.dumps(json.loads(row) | {"instance_id": f"{BUG}-again"})
    data = root / "bugs.jsonl"
    data.write_text(f"{row}\n{again}\n")
    held = root / "held.jsonl"
    held.write_text(f"{row}\n")
    recipe = recipe_of(data, root / "store", rootfs, package)
    recipe.tasks["swe"] = dataclasses.replace(recipe.tasks["swe"], validation_data=str(held))
    task = open_swe("swe", recipe.tasks["swe"], usable_only=False)
    bug = next(bug for bug in task.bugs() if bug.instance_id == BUG)
    try:
        build_pypi(bug, task.settings.store)
    except BuildError as err:
        return {"skip": str(err)}
    patch = base64.b64encode(task.gold(bug)).decode()
    mend = f"cd /testbed && echo {patch} | base64 -d | git apply --whitespace=nowarn"
    scripts = [[answer(mend), answer(LOOK), answer(SUBMIT)], [answer(SUBMIT)]]
    return asyncio.run(work(recipe, task, root, scripts))


if __name__ == "__main__":
    print(json.dumps(main(*(Path(argument) for argument in sys.argv[1:4]))))
