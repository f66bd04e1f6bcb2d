"""Shell problems in real sandboxes: what agents leave, what scripts find, what they can't fool."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prorl_hpc.agents.registry import make_agent
from prorl_hpc.agents.replay import Policy
from prorl_hpc.agents.tools import spell_call
from prorl_hpc.choices import AgentKind, EnvironmentKind
from prorl_hpc.environment.base import Environment, EnvironmentEnded, TransferError
from prorl_hpc.environment.factory import EnvironmentFactory
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Kind, Outcome, Score, Trajectory
from prorl_hpc.rollout.pipeline import Parts, Pipeline
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.run import Run
from prorl_hpc.tasks.base import TaskError, VerifierError
from prorl_hpc.tasks.cli import task as cli_task
from prorl_hpc.tasks.cli.made import FAMILIES
from prorl_hpc.tasks.cli.task import UNREADABLE, CliTask, make_cli
from tests.prorl_hpc.agents.templates import byte_tokenizer
from tests.prorl_hpc.rollout.helpers import LocalScorer, make_lease, make_recipe
from tests.prorl_hpc.tasks.cli_problems import OTHER, ROW, SECRET, all_families
from tests.prorl_hpc.tasks.swe_bug import need_bubblewrap

pytestmark = pytest.mark.process

SECONDS = 120.0


def task_of(tmp_path: Path, rows: Sequence[dict[str, Any]] = (), **fields: Any) -> CliTask:
    data = tmp_path / "cli.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings: dict[str, Any] = {
        "kind": "cli", "environment": EnvironmentKind.bubblewrap, "agent": AgentKind.bash,
        "data": str(data) if rows else None, "validation_size": 1 if rows else 64, "max_turns": 9,
    }  # fmt: skip
    return make_cli("cli", TaskConfig(**(settings | fields)), 0)


Work = Callable[[Environment], Awaitable[None]]


def commands(*lines: str) -> Work:
    async def work(environment: Environment) -> None:
        for line in lines:
            await environment.run(line, SECONDS)

    return work


class Bench:
    """Attempts without a model, in one process' sandboxes."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def attempt(self, task: CliTask, instance: Any, work: Work) -> tuple[bytes, Score]:
        return self.attempts(task, [(instance, work)])[0]

    def attempts(
        self, task: CliTask, jobs: Sequence[tuple[Any, Work]]
    ) -> list[tuple[bytes, Score]]:
        async def one(factory: EnvironmentFactory, instance: Any, work: Work) -> Any:
            async with factory.create(task.environment_spec(instance)) as environment:
                await task.setup(instance, environment)
                await work(environment)
                result = await task.result(instance, environment)
            return result, await task.score_in(
                instance, result=result, response="", make_environment=factory.create
            )

        async def run() -> list[tuple[bytes, Score]]:
            factory = EnvironmentFactory(self._scratch)
            try:
                return [await one(factory, instance, work) for instance, work in jobs]
            finally:
                factory.close()

        return asyncio.run(run())


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    need_bubblewrap()
    return Bench(tmp_path_factory.mktemp("scratch"))


def own(task: CliTask) -> Any:
    """The instance of ROW, whichever side it is on."""
    for kind in Kind:
        for index in range(task.size(kind)):
            instance = task.instance(index, kind=kind)
            if instance.instance_id == "double":
                return instance
    raise AssertionError


def test_each_family_is_solved_by_its_solution_and_not_by_nothing(
    bench: Bench, tmp_path: Path
) -> None:
    task = all_families(EnvironmentKind.bubblewrap)
    instances = [task.instance(index, kind=Kind.train) for index in range(task.size(Kind.train))]
    found = bench.attempts(task, [(one, commands(one.answer.solution)) for one in instances])
    assert [score.reward for _, score in found] == [1.0] * len(instances)
    assert found[0][1].components == {"fraction": 1.0, "done": 1.0, "guarded": 1.0}
    _, nothing = bench.attempt(task, instances[0], commands())
    assert nothing == Score(reward=0.0, components={"fraction": 0.0, "done": 0.0, "guarded": 1.0})


def test_scripts_decide_over_the_agents_files(bench: Bench, tmp_path: Path) -> None:
    task = task_of(tmp_path, [ROW, OTHER])
    shares = task_of(tmp_path, [ROW, OTHER], options={"reward": "fraction"})
    instance = own(task)
    _, solved = bench.attempt(task, instance, commands(ROW["solution"]))
    assert (solved.reward, solved.outcome) == (1.0, Outcome.scored)
    _, half = bench.attempt(task, instance, commands("echo wrong > b.txt"))
    assert (half.reward, half.components["fraction"]) == (0.0, 0.5)
    assert bench.attempt(shares, instance, commands("echo wrong > b.txt"))[1].reward == 0.5
    assert bench.attempt(shares, instance, commands())[1].reward == 0.0
    guard = commands(ROW["solution"], "echo z >> a.txt")
    assert bench.attempt(shares, instance, guard)[1].components["guarded"] == 0.0
    # what was there before and is gone is gone for the scripts too
    gone = commands(ROW["solution"], "rm -r deep")
    assert bench.attempt(shares, instance, gone)[1].reward == 0.0


TRICKS = {
    # in the verifier's directory this would be its own b.txt
    "a link to where a reader stands": ["ln -s /proc/self/cwd/b.txt b.txt"],
    "a link by way of others": [
        "mkdir -p p/q; ln -s /tmp/work p/q/r; ln -s p/q/r/../../proc/self/cwd/b.txt b.txt"
    ],
    "the verifier's own modules": ["echo 'import os; os._exit(0)' > json.py", "cp json.py sys.py"],
    "programs and files of the shell": [
        "printf '#!/bin/sh\\nexit 0' > diff; chmod 755 diff; cp diff grep; cp diff python3",
        "echo 'exit 0' > .bashrc; cp .bashrc ~; export BASH_ENV=$PWD/.bashrc PATH=$PWD:$PATH",
        "diff() { true; }; export -f diff; alias tar=true; set -euf; trap true EXIT DEBUG",
    ],
}


def test_tricks_earn_nothing(bench: Bench, tmp_path: Path) -> None:
    task = task_of(tmp_path, [ROW, OTHER], options={"reward": "fraction"})
    instance = own(task)
    found = bench.attempts(task, [(instance, commands(*lines)) for lines in TRICKS.values()])
    rewards = {name: score.reward for name, (_, score) in zip(TRICKS, found, strict=True)}
    assert rewards == dict.fromkeys(TRICKS, 0.0)
    # and an honest solution in a strange shell is still one
    odd = "tar() { false; }; export TAR_OPTIONS=--exclude=b.txt; set -f; cd /"
    assert bench.attempt(task, instance, commands(ROW["solution"], odd))[1].reward == 1.0


LEFT_UNREADABLE = {
    "gone": "cd /; rm -rf /tmp/work",
    "replaced by a link": "cd /; rm -rf /tmp/work; ln -s /etc /tmp/work",
    "more than is taken": "head -c 40000000 /dev/urandom > b.txt",
    "a hole of many bytes": "truncate -s 900G b.txt 2>/dev/null || truncate -s 1000M b.txt",
    "closed": "mkdir locked; touch locked/a; chmod 000 locked",
    "strange names": "touch $'new\\nline' $'\\xff\\xfe' -- -rf; mkfifo pipe; ln a.txt hard",
}


def test_whatever_is_left_is_a_score(bench: Bench, tmp_path: Path) -> None:
    task = task_of(tmp_path, [ROW, OTHER])
    instance = own(task)
    jobs = [(instance, commands(line)) for line in LEFT_UNREADABLE.values()]
    found = dict(zip(LEFT_UNREADABLE, bench.attempts(task, jobs), strict=True))
    assert {name: score.reward for name, (_, score) in found.items()} == dict.fromkeys(found, 0.0)
    result, score = found["more than is taken"]
    assert (result, score.outcome) == (UNREADABLE, Outcome.invalid)
    assert found["strange names"][1].components["guarded"] == 1.0


def test_nothing_hidden_is_in_the_agents_sandbox(bench: Bench, tmp_path: Path) -> None:
    said: list[str] = []

    async def look(environment: Environment) -> None:
        for line in (
            f"grep -rl {SECRET[:12]} /tmp /proc/self/environ 2>/dev/null",
            "env",
            "ls -a /tmp",
        ):
            said.append((await environment.run(line, SECONDS)).text)

    task = task_of(tmp_path, [ROW, OTHER])
    bench.attempt(task, own(task), look)
    assert said[0].strip() == ""
    assert "VERIFY" not in said[1]
    assert ".prorl" not in said[2]


def test_scripts_that_never_end_cost_the_agent_and_not_the_infrastructure(
    bench: Bench, tmp_path: Path
) -> None:
    endless = ROW | {"verify": {str(n): "sh b.txt" for n in range(40)} | {"last": "true"}}
    fields = {"score_timeout_seconds": 5.0, "options": {"reward": "fraction"}}
    task = task_of(tmp_path, [endless, OTHER], **fields)
    _, score = bench.attempt(task, own(task), commands("echo 'sleep 3600' > b.txt"))
    assert (score.reward, score.outcome) == (0.0, Outcome.scored)
    assert score.components["out_of_time"] == 1.0


def test_a_setup_that_fails_is_nobodys_reward(bench: Bench, tmp_path: Path) -> None:
    broken = ROW | {"setup": "echo no such thing; exit 3"}
    task = task_of(tmp_path, [broken, OTHER])
    with pytest.raises(Exception, match="double: setup failed: no such thing"):
        bench.attempt(task, own(task), commands())


def test_one_answer_may_be_the_whole_work(bench: Bench, tmp_path: Path) -> None:
    task = task_of(tmp_path, [ROW, OTHER], agent=AgentKind.single_turn)
    instance = own(task)

    def score(response: str) -> Score:
        async def run() -> Score:
            factory = EnvironmentFactory(tmp_path / "scratch")
            try:
                return await task.score_in(
                    instance, result=b"", response=response, make_environment=factory.create
                )
            finally:
                factory.close()

        return asyncio.run(run())

    assert task.demonstration(instance) == "```bash\n./run.sh > b.txt\n```"
    assert score(f"<think>hm</think>{task.demonstration(instance)}").reward == 1.0
    assert score("no script").components == {"fraction": 0.0, "no_script": 1.0}
    assert score("```bash\nkill -9 $$; kill -9 $PPID\n```").reward == 0.0


class Node:
    """A pipeline whose only task is `sums`, of this kind."""

    def __init__(self, tmp_path: Path, answers: Any, **fields: Any) -> None:
        settings: dict[str, Any] = {
            "kind": "cli", "environment": EnvironmentKind.bubblewrap, "agent": AgentKind.bash,
            "max_turns": 6, "score_timeout_seconds": 300.0,
        }  # fmt: skip
        config = TaskConfig(**(settings | fields))
        recipe = make_recipe(max_new_tokens=2000, episode_seconds=600.0)
        recipe = replace(
            recipe, tasks={"sums": config}, model=replace(recipe.model, context_tokens=30_000)
        )
        self.task = make_cli("sums", config, recipe.seed)
        tokenizer = byte_tokenizer()
        engine = ScriptedEngine(tokenizer, answers)
        self.factory = EnvironmentFactory(tmp_path / "scratch")
        self.pipeline = Pipeline(
            Parts(
                recipe=recipe, tasks={"sums": self.task},
                agents={"sums": make_agent(config, tokenizer=tokenizer, task=self.task)},
                tokenizer=tokenizer, engine=engine,
                versions=Versions(engine, run=Run(tmp_path / "run"), publish_seconds=0.1),
                scorer=LocalScorer(self.task), make_environment=self.factory.create,
                worker="rollout-0", attempt=1,
            )
        )  # fmt: skip

    def produce(self, *rollouts: int, index: int = 0) -> list[Trajectory]:
        async def run() -> list[Trajectory]:
            lease = make_lease(instance_index=index)
            try:
                return [await self.pipeline.produce(lease, rollout) for rollout in rollouts]
            finally:
                self.factory.close()

        return asyncio.run(run())


def test_an_episode_of_the_bash_agent(tmp_path: Path) -> None:
    need_bubblewrap()
    task = make_cli(
        "sums", TaskConfig(kind="cli", environment=EnvironmentKind.bubblewrap,
                           agent=AgentKind.bash), make_recipe().seed,
    )  # fmt: skip
    solution = task.instance(0, kind=Kind.train).answer.solution
    answers = ["I look first.\n```bash\nfind . -type f | wc -l\n```", f"```bash\n{solution}\n```",
               "```bash\nsubmit\n```"]  # fmt: skip
    (done,) = Node(tmp_path, answers).produce(0)
    assert (done.outcome, done.reward) == (Outcome.scored, 1.0), done.detail
    assert done.components == {"fraction": 1.0, "done": 1.0, "guarded": 1.0}
    assert done.instance_id == f"{next(iter(FAMILIES))}-train-0"
    assert done.isolation["backend"] == "bubblewrap"
    text = byte_tokenizer().decode(done.tokens.tolist())
    assert text.count("(exit code 0)") == 2


@pytest.mark.parametrize("agent", [AgentKind.tools, AgentKind.single_turn])
def test_episodes_of_other_agents(tmp_path: Path, agent: AgentKind) -> None:
    need_bubblewrap()
    node = Node(tmp_path, lambda *_: next(answers), agent=agent)
    solution = node.task.instance(5, kind=Kind.train).answer.solution
    block = f"```bash\n{solution}\n```"
    calls = [spell_call("bash", {"command": solution}), spell_call("submit", {})]
    answers = iter([block] if agent is AgentKind.single_turn else calls)
    (done,) = node.produce(0, index=5)
    assert (done.outcome, done.reward) == (Outcome.scored, 1.0), done.detail
    assert done.isolation["backend"] == "bubblewrap"


@pytest.mark.parametrize(("policy", "rewards"), [
    (Policy.gold, [1.0, 1.0]), (Policy.empty, [0.0, 0.0]), (Policy.mixed, [1.0, 0.0]),
])  # fmt: skip
def test_replays(tmp_path: Path, policy: Policy, rewards: list[float]) -> None:
    need_bubblewrap()
    node = Node(tmp_path, lambda *_: "ok", options={"replay": policy.value})
    found = node.produce(0, 1, index=11)
    assert [one.reward for one in found] == rewards, [one.detail for one in found]


def test_a_replay_that_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"options\.replay='golden'; choose one of gold"):
        Node(tmp_path, [], options={"replay": "golden"})


def test_an_agent_that_ends_its_sandbox_scores_nothing(tmp_path: Path) -> None:
    need_bubblewrap()
    end = "```bash\nkill -9 $$\n```"
    (ended,) = Node(tmp_path, [end, end, end]).produce(0)
    assert ended.reward == 0.0
    assert ended.outcome is Outcome.invalid
    assert EnvironmentEnded.__name__ not in ended.detail


@pytest.mark.parametrize("broken_at", [0, 1])
def test_a_sandbox_that_takes_no_more_files_after_a_script_is_the_agents_doing(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken_at: int
) -> None:
    """A script may run what the agent wrote: before the first one it is the infrastructure."""
    row = ROW | {"checks": [], "verify": {"one": "true", "two": "true"}}
    task = task_of(tmp_path, [row, OTHER], options={"reward": "fraction"})
    begun: list[str] = []
    honest = cli_task._holds

    async def holds(environment: Environment, *given: Any, **named: Any) -> bool:
        begun.append("")
        if len(begun) > broken_at:
            raise TransferError("no space left on device")
        return await honest(environment, *given, **named)

    monkeypatch.setattr(cli_task, "_holds", holds)
    if broken_at:
        assert bench.attempt(task, own(task), commands())[1].reward == 0.5
    else:
        with pytest.raises(VerifierError, match="no space left"):
            bench.attempt(task, own(task), commands())
