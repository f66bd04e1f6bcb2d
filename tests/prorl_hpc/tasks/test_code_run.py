"""`recipe=code` on this machine, from the submit to trained steps, in real sandboxes.

The model is tiny and taught by the data set's own solutions; whether it gets better is not asked.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_hpc.buffer.manifest import live_shards, valid_lines
from prorl_hpc.buffer.shard import OpenShard
from prorl_hpc.records import Outcome, Trajectory
from tests.prorl_hpc.run_helpers import Session
from tests.prorl_hpc.tasks.swe_bug import need_bubblewrap

MBPP = {
    "task_id": 601, "text": "Add two.", "code": "def f(x):\n return x+2",
    "test_list": ["assert f(1) == 3", "assert f(5) == 7"],
}  # fmt: skip
LIVE = {
    "question_id": "twice", "question_content": "Print the number twice.",
    "public_test_cases": [{"input": "7\n", "output": "7 7\n", "testtype": "stdin"}],
    "private_test_cases": json.dumps([{"input": "1\n", "output": "1 1\n", "testtype": "stdin"}]),
    "metadata": "{}", "canonical_solution": "x=input()\nprint(x,x)",
}  # fmt: skip
SMALL = [
    "algorithm=quickstart", "model=tiny", "steps=2", "algorithm.batch_groups=2",
    "algorithm.num_rollouts=4", "algorithm.updates_per_step=1", "algorithm.filter_degenerate=false",
    "algorithm.reset.every_steps=null", "tasks.code.environment=bubblewrap",
    "tasks.code.validation_size=1", "tasks.code.options.seconds_per_test=60",
    "warmup.steps=60", "warmup.batch=16", "warmup.learning_rate=5e-3", "warmup.max_tokens=500",
    "rollout.nodes=1", "rollout.cpus_per_node=1", "rollout.gpus_per_node=0",
    "rollout.memory_mib=2048", "rollout.engine.kind=transformers", "rollout.engine.max_batch=8",
    "rollout.init_workers=2", "rollout.run_workers=8", "rollout.eval_workers=2",
    "rollout.max_new_tokens=48", "buffer.cpus=1", "buffer.memory_mib=1024",
    "learner.ranks_per_node=1", "learner.gpus_per_node=0", "learner.cpus_per_node=1",
    "learner.memory_mib=2048", "validation.every_steps=2",
]  # fmt: skip


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    need_bubblewrap()
    data, held = tmp_path / "code.jsonl", tmp_path / "held.jsonl"
    data.write_text(f"{json.dumps(MBPP)}\n{json.dumps(LIVE)}\n")
    held.write_text(json.dumps(MBPP | {"task_id": 602, "text": "Plus two."}) + "\n")
    files = [f"tasks.code.data={data}", f"tasks.code.validation_data={held}"]
    made = Session(runs=tmp_path / "runs", name="code", recipe="code", overrides=[*SMALL, *files])
    yield made
    made.end()


def stored(session: Session) -> list[Trajectory]:
    found = []
    for shard in live_shards(list(valid_lines(session.run.manifest))).values():
        path = session.run.shard(shard.number)
        reader = OpenShard(path, number=shard.number, digest=shard.checksum)
        found += [reader.read(row) for row in range(len(shard.rows))]
        reader.close()
    return found


@pytest.mark.process
@pytest.mark.timeout(1200)
def test_recipe_code_end_to_end(session: Session) -> None:
    session.submit("--wait")
    session.wait_end()
    assert [row["step"] for row in session.rows("step")] == [1, 2], session.said()
    assert [row["step"] for row in session.rows("validation")][-1] == 2
    found = [one for one in stored(session) if one.instance_id in ("601", "twice")]
    assert {one.instance_id for one in found} == {"601", "twice"}
    assert not [one.detail for one in found if one.outcome is Outcome.infrastructure_failure]
    right = [one for one in found if one.reward == 1.0]
    assert right, "nothing of what was demonstrated is repeated"
    assert right[0].components == {"fraction": 1.0, "all_passed": 1.0}
    assert right[0].isolation["backend"] == "bubblewrap"
    assert right[0].isolation["network_none"] == "True"
    # one sandbox per rollout: that of its scoring
    assert all(one.timings["init"] < one.timings["eval"] for one in right)
