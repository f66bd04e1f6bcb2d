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

SESSIONS = "nemo_gym"
"""Kind of the tasks whose functions come with each instance."""


def make_agent(config: TaskConfig, *, tokenizer: Any) -> Agent:
    """Raises TokenizerError when the chat template can't carry the agent's observations."""
    if config.options.get("replay"):
        from prorl_hpc.tasks.swe.rehearse import make_rehearsal

        return make_rehearsal(config, tokenizer=tokenizer)
    if config.kind == SESSIONS:
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
