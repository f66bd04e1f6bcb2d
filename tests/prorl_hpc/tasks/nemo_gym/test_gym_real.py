"""nemo-gym's own resources servers and example data, where an interpreter that has them is given.

    PRORL_GYM_PYTHON=VENV/bin/python pytest tests/prorl_hpc/tasks/nemo_gym/test_gym_real.py

They need Python 3.12 (0.7: 3.13) and bring Ray and wandb: too much for an environment of the tests.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.choices import AgentKind
from prorl_hpc.records import Kind, Outcome
from tests.prorl_hpc.rollout.helpers import make_lease
from tests.prorl_hpc.service.conftest import run
from tests.prorl_hpc.tasks.nemo_gym.test_gym_session import call, gym

PYTHON = os.environ.get("PRORL_GYM_PYTHON", "")
RUNNER = Path(__file__).parents[3] / "fakes" / "gym_real.py"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not PYTHON, reason="PRORL_GYM_PYTHON names no interpreter with nemo-gym"),
]


@contextmanager
def real(module: str, server: str, config: str) -> Iterator[str]:
    command = [PYTHON, str(RUNNER), f"resources_servers.{module}.app", server, config]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, process.wait(60)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def examples(module: str) -> list[dict[str, Any]]:
    """The example rows that the package brings."""
    code = f"import resources_servers.{module} as m; print(list(m.__path__)[0])"
    found = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip()) / "data" / "example.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_reasoning_gym_scores_right_and_wrong_answers(tmp_path: Path) -> None:
    data = examples("reasoning_gym")

    async def check(url: str) -> None:
        answers = [f"<think>hm</think><answer>{row['answer']}</answer>" for row in data]

        def answer(ids: tuple[int, ...], affinity: str) -> str:
            group = int(affinity.partition("-")[0])
            return answers[group] if group < len(answers) else "<answer>no idea</answer>"

        async with gym(tmp_path, answer, data=data, url=url) as it:
            task = it.pipeline._parts.tasks["sums"]
            for index in range(task.size(Kind.train)):
                row = task.instance(index, kind=Kind.train).answer
                right = make_lease(group_id=data.index(row), instance_index=index)
                trajectory = await it.pipeline.produce(right, 0)
                assert trajectory.outcome is Outcome.scored, trajectory.detail
                assert trajectory.reward == 1.0
                wrong = make_lease(group_id=1000, instance_index=index)
                assert (await it.pipeline.produce(wrong, 0)).reward < 1.0

    with real(
        "reasoning_gym", "ReasoningGymResourcesServer", "ReasoningGymResourcesServerConfig"
    ) as url:
        run(check(url))


def test_a_session_with_tools_keeps_its_state(tmp_path: Path) -> None:
    name = "example_session_state_mgmt"
    data = examples(name)[:2]
    for row in data:
        row["expected_count"] = row["initial_count"] + 5

    async def check(url: str) -> None:
        answers = [
            call("increment_counter", count=2),
            call("increment_counter", count="many") + call("increment_counter", count=3),
            call("get_counter_value"),
            "done",
        ]
        async with gym(
            tmp_path, answers, data=data, url=url, agent=AgentKind.tools, max_turns=6
        ) as it:
            trajectories = await asyncio.gather(it.attempt())
            assert trajectories[0].outcome is Outcome.scored, trajectories[0].detail
            assert trajectories[0].reward == 1.0

    with real(
        name, "StatefulCounterResourcesServer", "StatefulCounterResourcesServerConfig"
    ) as url:
        run(check(url))
