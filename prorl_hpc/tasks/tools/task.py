"""Function calling as a task: several turns in simulated worlds, or one answer of expected calls.

    tasks.NAME: {kind: tools, agent: tools, max_turns: 12, options: {level: [1, 3]}}
    tasks.NAME: {kind: tools, agent: tools, data: FILE.jsonl}

Needs no sandbox and no server: sessions are objects of this process. Knows no engine.
"""

from collections.abc import Sequence

from prorl_hpc.agents.replay import Policy
from prorl_hpc.choices import AgentKind, EnvironmentKind
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import JSON, Instance, Kind, Message, Score
from prorl_hpc.tasks.answers import prompt_messages, read_options
from prorl_hpc.tasks.base import TaskError, VerifierError
from prorl_hpc.tasks.jsonl import ProblemTask, split_problems
from prorl_hpc.tasks.session_task import Session
from prorl_hpc.tasks.tools.made import Made, MadeUp, read_made
from prorl_hpc.tasks.tools.rows import Listed, decode_row
from prorl_hpc.tasks.tools.sessions import ListedSession, WorldSession

OPTIONS = {
    "worlds": object, "level": object, "wishes": object, "questions": object, "reward": str,
    "strings": str, "replay": str,
}  # fmt: skip


class ToolsTask:
    """Instances with functions of their own."""

    def __init__(
        self, name: str, source: MadeUp | ProblemTask, *, system_prompt: str | None,
        all_or_nothing: bool, loose: bool, replay: Policy | None,
    ) -> None:  # fmt: skip
        self.name = name
        self._source = source
        self._system_prompt = system_prompt
        self._all_or_nothing = all_or_nothing
        self._loose = loose
        self._replay = replay

    def size(self, kind: Kind) -> int:
        source = self._source
        return source.sizes[kind] if isinstance(source, MadeUp) else source.size(kind)

    def instance(self, index: int, *, kind: Kind) -> Instance:
        """Raises TaskError when the worlds have too few distinct problems for two sides."""
        if not isinstance(self._source, MadeUp):
            return self._source.instance(index, kind=kind)
        made = self._source.problem(index, kind=kind)
        return Instance(
            task=self.name,
            instance_id=f"{made.world}-{kind.value}-{index}",
            index=index,
            messages=prompt_messages(made.text, system_prompt=self._system_prompt),
            answer=made,
        )

    def score(self, instance: Instance, response: str) -> Score:  # noqa: ARG002
        raise VerifierError(f"task {self.name} is scored in a session")

    def demonstration(self, instance: Instance) -> str | None:  # noqa: ARG002
        """None: what a demonstration is shown with declares no functions."""
        return None

    def check_instance(self, instance: Instance) -> None:
        """Raises ValueError for an instance that isn't one of these."""
        read_answer(instance.answer)

    def session(self, instance: Instance) -> Session:
        answer, messages = read_answer(instance.answer), instance.messages
        if isinstance(answer, Made):
            return self._world(answer, messages)
        return ListedSession(
            answer, messages=messages, all_or_nothing=self._all_or_nothing, loose=self._loose,
            replay=self._replay,
        )  # fmt: skip

    def _world(self, made: Made, messages: Sequence[Message]) -> WorldSession:
        return WorldSession(
            made, messages=messages, all_or_nothing=self._all_or_nothing, replay=self._replay
        )


def read_answer(answer: JSON) -> Made | Listed:
    """An instance's own data; of one that a client posted, a line of a data set but its prompt.

    Worlds are made here alone: a posted state could hold anything. Raises ValueError.
    """
    if isinstance(answer, Made | Listed):
        return answer
    if not isinstance(answer, dict):
        raise ValueError("answer must be an object with tools and calls")
    try:
        row = {**answer, "prompt": "posted"}
        listed: Listed = decode_row(row, system_prompt=None).answer
    except KeyError as err:
        raise ValueError(f"answer has no field {err}; it needs tools and calls") from err
    except TypeError as err:
        raise ValueError(f"answer: {err}") from err
    return listed


def make_tools(name: str, config: TaskConfig, seed: int) -> ToolsTask:
    """The task of a recipe. Raises TaskError for what can't be set up, naming the key."""
    options = read_options(name, config.options, OPTIONS)
    if config.environment is not EnvironmentKind.none or config.agent is not AgentKind.tools:
        raise TaskError(
            f"tasks.{name}: functions are simulated; set agent=tools and environment=none"
        )
    reward, strings = options.get("reward", "all"), options.get("strings", "loose")
    if reward not in ("fraction", "all"):
        raise TaskError(f"tasks.{name}.options.reward={reward!r}; choose fraction or all")
    if strings not in ("loose", "exact"):
        raise TaskError(f"tasks.{name}.options.strings={strings!r}; choose loose or exact")
    return ToolsTask(
        name,
        _source(name, config, seed),
        system_prompt=config.system_prompt,
        all_or_nothing=reward == "all",
        loose=strings == "loose",
        replay=_policy(name, options.get("replay")),
    )


def _source(name: str, config: TaskConfig, seed: int) -> MadeUp | ProblemTask:
    if config.data is None:
        if config.max_turns < 2:
            raise TaskError(
                f"tasks.{name}.max_turns={config.max_turns} leaves no turn after a call; set 12"
            )
        return read_made(name, config, seed)
    given = sorted({"worlds", "level", "wishes", "questions"} & set(config.options))
    if given:
        raise TaskError(
            f"tasks.{name}.options.{given[0]} is for problems that are made, but "
            f"data={config.data!r}; drop one"
        )
    problems = split_problems(
        name, config, decode=lambda row: decode_row(row, system_prompt=config.system_prompt)
    )
    return ProblemTask(name, problems, check=_no_check)


def _policy(name: str, asked: str | None) -> Policy | None:
    if not asked:
        return None
    if asked not in (Policy.gold, Policy.empty, Policy.mixed):
        raise TaskError(f"tasks.{name}.options.replay={asked!r}; choose gold, empty or mixed")
    return Policy(asked)


def _no_check(answer: JSON, response: str) -> Score:  # noqa: ARG001
    raise VerifierError("expected calls are compared in a session")
