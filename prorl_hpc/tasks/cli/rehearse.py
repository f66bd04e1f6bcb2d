"""The replay agent of a task of the command line (`options.replay`). The task has the solutions."""

from prorl_hpc.agents.replay import Policy, Replay, replay_scripts
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.tasks.base import TaskError
from prorl_hpc.tasks.cli.problem import WORK
from prorl_hpc.tasks.cli.task import CliTask


def make_cli_rehearsal(config: TaskConfig, *, task: object) -> Replay:
    """Raises TaskError for an unknown policy. Where a problem has no solution nothing is done."""
    policy = read_policy(config.options["replay"])
    assert isinstance(task, CliTask), "solutions come from the task that makes the instances"
    solver = task
    return replay_scripts(
        policy, gold=lambda messages: [solver.solution_for(messages)], directory=WORK
    )


def read_policy(asked: object) -> Policy:
    """Raises TaskError."""
    try:
        return Policy(str(asked))
    except ValueError as err:
        raise TaskError(f"options.replay={asked!r}; choose one of {', '.join(Policy)}") from err
