"""The replay agent of a recipe that asks for one (`options.replay`). Reads gold patches."""

from typing import Any

from prorl_hpc.agents.replay import Policy, Replay, make_replay
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.tasks.base import TaskError
from prorl_hpc.tasks.swe.score import TREE
from prorl_hpc.tasks.swe.task import open_swe


def make_rehearsal(config: TaskConfig, *, tokenizer: Any) -> Replay:  # noqa: ARG001
    """Raises TaskError for an unknown policy, or a kind of task that has no gold patches."""
    asked = config.options["replay"]
    try:
        policy = Policy(asked)
    except ValueError as err:
        raise TaskError(f"options.replay={asked!r}; choose one of {', '.join(Policy)}") from err
    if config.kind != "swe":
        raise TaskError(
            f"options.replay needs a task of kind swe, cli or tools, not {config.kind!r}"
        )
    task = open_swe("swe", config, usable_only=True)
    golds = {task.instance_of(bug).messages[-1].content: task.gold(bug) for bug in task.bugs()}
    return make_replay(policy, golds=golds, directory=TREE)
