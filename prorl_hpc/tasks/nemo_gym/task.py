"""A NeMo Gym data set as a task: rows are prompts, a resources server leads tools and scores.

    tasks.NAME: {kind: nemo_gym, data: FILE.jsonl, options: {resources_server: URL}}

In a mixed data set `options.resources_servers` maps the names of `agent_ref` to URLs. With tools in
the rows: agent=tools, and max_turns. A server that fails, or that masks the sample itself
(`mask_sample`), is an infrastructure failure and never a reward.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from prorl_hpc.agents.episode import Agent, Conversation
from prorl_hpc.agents.functions import FunctionCalls, Step
from prorl_hpc.agents.render import ToolSchema
from prorl_hpc.agents.tools import Call
from prorl_hpc.agents.turns import turns_of
from prorl_hpc.choices import AgentKind, EnvironmentKind
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Instance, Kind, Outcome, RecordError, Score, check_reward
from prorl_hpc.tasks.answers import read_options
from prorl_hpc.tasks.base import TaskError, VerifierError
from prorl_hpc.tasks.jsonl import ProblemTask, split_problems
from prorl_hpc.tasks.nemo_gym.responses import output_items, response_object
from prorl_hpc.tasks.nemo_gym.rows import agent_of, decode_row, row_of, tools_of
from prorl_hpc.tasks.nemo_gym.server import Connect, ServerSession, Verified


def make_nemo_gym(name: str, config: TaskConfig, seed: int) -> "NemoGymTask":  # noqa: ARG001
    """Raises TaskError."""
    options = read_options(
        name, config.options, {"resources_server": object, "resources_servers": dict}
    )
    agents = (AgentKind.single_turn, AgentKind.tools)
    if config.environment is not EnvironmentKind.none or config.agent not in agents:
        raise TaskError(
            f"tasks.{name}: a Gym server is the environment; set environment=none and "
            "agent=single_turn or tools"
        )
    servers = _servers(name, options)
    problems = split_problems(
        name,
        config,
        decode=lambda row: decode_row(row, agent=config.agent, system_prompt=config.system_prompt),
    )
    task = NemoGymTask(
        ProblemTask(name, problems, check=_no_check),
        servers=servers,
        timeout_seconds=config.score_timeout_seconds,
    )
    for kind in Kind:
        for index in range(task.size(kind)):
            try:
                task.check_instance(task.instance(index, kind=kind))
            except ValueError as err:
                raise TaskError(f"tasks.{name}: {kind.value} row {index}: {err}") from err
    return task


class NemoGymTask:
    """Instances from rows, sessions at servers."""

    def __init__(
        self,
        problems: ProblemTask,
        *,
        servers: Mapping[str, str],
        timeout_seconds: float,
        connect: Connect = ServerSession,
    ) -> None:
        """`servers` maps names of agents to URLs; the empty name stands for any other."""
        self.name = problems.name
        self._problems = problems
        self._servers = servers
        self._timeout_seconds = timeout_seconds
        self._connect = connect

    def size(self, kind: Kind) -> int:
        return self._problems.size(kind)

    def instance(self, index: int, *, kind: Kind) -> Instance:
        return self._problems.instance(index, kind=kind)

    def score(self, instance: Instance, response: str) -> Score:  # noqa: ARG002
        raise VerifierError(f"task {self.name} is scored by its server, in a session")

    def demonstration(self, instance: Instance) -> str | None:  # noqa: ARG002
        """None: the server alone knows what is right."""
        return None

    def check_instance(self, instance: Instance) -> None:
        """Raises ValueError for an instance without a row, or whose agent has no server."""
        row = row_of(instance.answer)
        tools_of(row)
        self._server(row)

    def session(self, instance: Instance) -> "GymSession":
        row = row_of(instance.answer)
        return GymSession(
            instance,
            row=row,
            server=self._connect(self._server(row)),
            timeout_seconds=self._timeout_seconds,
        )

    def _server(self, row: dict[str, Any]) -> str:
        agent = agent_of(row)
        url = self._servers.get(agent, self._servers.get(""))
        if url is None:
            known = ", ".join(self._servers)
            raise ValueError(
                f"agent_ref.name={agent!r} has no server; add it to "
                f"tasks.{self.name}.options.resources_servers (there: {known})"
            )
        return url


class GymSession:
    """One attempt; see prorl_hpc.tasks.session_task.Session."""

    def __init__(
        self, instance: Instance, *, row: dict[str, Any], server: ServerSession,
        timeout_seconds: float,
    ) -> None:  # fmt: skip
        self._instance = instance
        self._row = row
        self._server = server
        self._timeout_seconds = timeout_seconds
        self._schemas = tools_of(row)
        self._steps: list[Step] = []

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        return self._schemas

    async def open(self) -> None:
        await self._server.seed(self._row, timeout_seconds=self._timeout_seconds)

    async def lead(self, agent: Agent, conversation: Conversation) -> None:
        assert isinstance(agent, FunctionCalls), "the registry of agents makes this task's agent"
        await agent.converse(
            conversation, messages=self._instance.messages, functions=self, steps=self._steps
        )

    async def call(self, call: Call) -> str:
        """Only what the row declares can be called: the policy writes the names."""
        names = [schema["function"]["name"] for schema in self._schemas]
        if call.name not in names:
            return f"There is no tool {call.name!r}; the tools are {', '.join(names)}."
        return await self._server.call(
            call.name, call.arguments, timeout_seconds=self._timeout_seconds
        )

    async def score(self, conversation: Conversation) -> Score:
        transcript = conversation.transcript
        turns = turns_of(
            transcript.tokens, loss_mask=transcript.loss_mask, logprobs=transcript.logprobs
        )
        response = response_object(
            f"resp_{self._instance.instance_id}",
            output=output_items(self._steps, turns),
            tools=self._row["responses_create_params"].get("tools") or (),
            created_at=time.time(),
            cut=conversation.finish_reason == "length",
        )
        body = self._row | {"response": response}
        return score_of(await self._server.verify(body, timeout_seconds=self._timeout_seconds))

    async def close(self) -> None:
        await self._server.close()


def score_of(verified: Verified) -> Score:
    """Raises VerifierError for a masked sample, and for rewards that aren't finite numbers."""
    if verified.mask_sample:
        kind = verified.failure_kind or "no kind"
        raise VerifierError(
            f"the server masks this sample ({kind}): {verified.failure_reason or 'no reason given'}"
        )
    components = verified.reward_components or {}
    try:
        for label, value in {"reward": verified.reward, **components}.items():
            check_reward(value, outcome=Outcome.scored, name=f"{label} of /verify")
    except RecordError as err:
        raise VerifierError(str(err)) from err
    return Score(
        reward=float(verified.reward),
        components={label: float(value) for label, value in components.items()},
    )


def _servers(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    key = f"tasks.{name}.options"
    servers = dict(options.get("resources_servers") or {})
    if options.get("resources_server") is not None:
        servers[""] = options["resources_server"]
    if not servers:
        raise TaskError(f"{key}.resources_server is missing; give the server's http://HOST:PORT")
    for agent, url in servers.items():
        if not isinstance(url, str) or not _is_url(url):
            label = f"{key}.resources_servers.{agent}" if agent else f"{key}.resources_server"
            raise TaskError(f"{label}={url!r} isn't http://HOST:PORT")
    return {agent: url.rstrip("/") for agent, url in servers.items()}


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _no_check(answer: Any, response: str) -> Score:  # noqa: ARG001
    raise VerifierError("a Gym task is scored by its server")
