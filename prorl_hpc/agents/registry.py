"""The agent of each task of a recipe. Checks at start that its template can carry it."""

from typing import Any

from prorl_hpc.agents.bash import Bash
from prorl_hpc.agents.episode import Agent
from prorl_hpc.agents.functions import FunctionCalls
from prorl_hpc.agents.harness import Harness
from prorl_hpc.agents.render import observation_renderer
from prorl_hpc.agents.single_turn import SingleTurn
from prorl_hpc.agents.tools import TOOLS, Tools
from prorl_hpc.choices import AgentKind
from prorl_hpc.recipe import TaskConfig

SESSIONS = ("nemo_gym", "tools")
"""Kinds of the tasks whose functions come with each instance."""


def make_agent(config: TaskConfig, *, tokenizer: Any, task: object = None) -> Agent:
    """Raises TokenizerError when the chat template can't carry the agent's observations.

    `task` is asked for its solutions, where the recipe replays them.
    """
    if config.options.get("replay") and config.kind not in SESSIONS:
        return _make_replay(config, tokenizer=tokenizer, task=task)
    if config.kind in SESSIONS:
        tools = config.agent is AgentKind.tools
        return FunctionCalls(
            observation_renderer(tokenizer, role="tool", tools=TOOLS) if tools else None
        )
    if config.agent is AgentKind.bash:
        return Bash(observation_renderer(tokenizer, role="user"))
    if config.agent is AgentKind.tools:
        return Tools(observation_renderer(tokenizer, role="tool", tools=TOOLS))
    if config.agent is AgentKind.harness:
        return Harness(config.harness, tokenizer=tokenizer)
    return SingleTurn()


def _make_replay(config: TaskConfig, *, tokenizer: Any, task: object) -> Agent:
    if config.kind == "cli":
        from prorl_hpc.tasks.cli.rehearse import make_cli_rehearsal

        return make_cli_rehearsal(config, task=task)
    from prorl_hpc.tasks.swe.rehearse import make_rehearsal

    return make_rehearsal(config, tokenizer=tokenizer)
