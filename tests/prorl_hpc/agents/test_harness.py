"""A program that speaks the API, in a real sandbox without network, through the whole pipeline.

The program is a few lines of the standard library; mini-swe-agent itself is run by
tests/cluster/test_harness.py.
"""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc.container_probe import probe
from hpc.isolation import Feature
from prorl_hpc.choices import AgentKind, EnvironmentKind
from prorl_hpc.cli.main import main
from prorl_hpc.environment import Backend, EnvironmentFactory, EnvironmentSpec
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.recipe import HarnessConfig, RecipeError, check
from prorl_hpc.records import Outcome
from prorl_hpc.run import Run
from tests.fakes.environments import ShellTask
from tests.prorl_hpc.agents.templates import byte_tokenizer
from tests.prorl_hpc.rollout.helpers import make_lease, make_pipeline, make_recipe

pytestmark = pytest.mark.process

CLIENT = """\
import json, os, subprocess, sys, urllib.error, urllib.request
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    body = json.dumps({"messages": messages, "stream": False}).encode()
    where = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(where, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as reply:
            message = json.load(reply)["choices"][0]["message"]
    except urllib.error.HTTPError as err:
        print("refused", err.code)
        sys.exit(int(os.environ.get("REFUSED", "3")))
    if message["content"] == "stop":
        break
    done = subprocess.run(message["content"], shell=True, capture_output=True, text=True)
    messages += [message, {"role": "user", "content": "output: " + done.stdout}]
print("handed in")
"""


class FileTask(ShellTask):
    """Rewards the text `fix` in the file `answer` of the sandbox."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        super().__init__()
        self.spec = spec

    def environment_spec(self, instance: Any) -> EnvironmentSpec:
        return self.spec

    async def result(self, instance: Any, environment: Any) -> bytes:
        done = await environment.run("cat answer", 60.0)
        return done.output


@pytest.fixture
def plain(tmp_path: Path) -> EnvironmentSpec:
    """No isolation: what is tested isn't about it."""
    return EnvironmentSpec(
        backend=Backend.process, image=None, directory=str(tmp_path / "work"),
        accept_missing=frozenset(Feature),
    )  # fmt: skip


@pytest.fixture
def isolated() -> EnvironmentSpec:
    """No network."""
    if not {Feature.container, Feature.network_none} <= probe().bubblewrap_features:
        pytest.skip(f"bubblewrap can't isolate here: {probe().bubblewrap_error}")
    return EnvironmentSpec(backend=Backend.bubblewrap, image=None, directory="/tmp/work")


def produce(
    root: Path, spec: EnvironmentSpec, answers: Any, *, command: Any = None, package: Any = None,
    max_turns: int = 9, episode_seconds: float = 240.0, context_tokens: int = 10_000,
    engine: Any = None, **variables: str,
) -> Any:  # fmt: skip
    """One attempt; nothing of it may be left."""
    recipe = make_recipe(episode_seconds=episode_seconds, max_new_tokens=400)
    recipe.model.context_tokens = context_tokens
    recipe.tasks["sums"] = dataclasses.replace(
        recipe.tasks["sums"],
        agent=AgentKind.harness,
        environment=EnvironmentKind.bubblewrap,
        max_turns=max_turns,
        harness=HarnessConfig(
            command=command or ["python3", "-c", CLIENT, "{problem}"],
            package=None if package is None else str(package),
            variables=variables,
        ),
    )
    tokenizer = byte_tokenizer()

    async def work() -> Any:
        factory = EnvironmentFactory(root / "scratch")
        pipeline = make_pipeline(
            engine or ScriptedEngine(tokenizer, answers),
            run=Run(root / "run"),
            recipe=check(recipe),
            task=FileTask(spec),
            tokenizer=tokenizer,
            make_environment=factory.create,
        )
        try:
            done = await pipeline.produce(make_lease(), 0)
            left = [p for worker in (root / "scratch").iterdir() for p in worker.iterdir()]
            assert [path.name for path in left] == ["lock"]
        finally:
            factory.close()
        return done

    return asyncio.run(work())


@pytest.mark.parametrize("kind", ["plain", "isolated"])
def test_a_program_works_in_the_sandbox_and_its_calls_are_one_trajectory(
    tmp_path: Path, request: Any, kind: str
) -> None:
    spec = request.getfixturevalue(kind)
    done = produce(tmp_path, spec, ["pwd", "echo fixed >answer", "stop"])
    assert (done.outcome, done.reward) == (Outcome.scored, 1.0), done.detail
    text = byte_tokenizer().decode(done.tokens)
    assert "<|im_start|>user\nfix it<|im_end|>" in text
    assert f"output: {spec.directory}\n" in text
    assert done.components == {"calls": 3.0, "branches": 1.0, "left_out_tokens": 0.0}
    sampled = byte_tokenizer().decode(done.tokens[done.loss_mask == 1])
    assert sampled == "pwd<|im_end|>echo fixed >answer<|im_end|>stop<|im_end|>"
    assert done.finish_reason == "stop"
    assert done.detail == ""


def test_the_turn_limit_is_a_typed_outcome(tmp_path: Path, plain: EnvironmentSpec) -> None:
    done = produce(tmp_path, plain, ["echo fixed >answer", "true", "never"], max_turns=2)
    assert (done.outcome, done.finish_reason) == (Outcome.truncated, "turns")
    assert done.reward == 1.0  # scored as it stands
    assert done.detail == "the harness ended with exit code 3: refused 403"
    assert done.components["calls"] == 2.0


def test_the_context_limit_is_a_typed_outcome(tmp_path: Path, plain: EnvironmentSpec) -> None:
    answers = ["echo fixed >answer; seq 2000", "never"]
    done = produce(tmp_path, plain, answers, context_tokens=1000)
    assert (done.outcome, done.finish_reason) == (Outcome.truncated, "length")
    assert done.detail == "the harness ended with exit code 3: refused 400"
    assert len(done.tokens) < 1000


def test_a_program_that_goes_on_after_its_last_call_is_ended(
    tmp_path: Path, plain: EnvironmentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_hpc.agents.harness.GRACE_SECONDS", 0.5)
    stubborn = CLIENT.replace("sys.exit(int", "import time; time.sleep(3600); sys.exit(int")
    done = produce(
        tmp_path, plain, ["echo fixed >answer", "never"], max_turns=1,
        command=["python3", "-c", stubborn, "{problem}"],
    )  # fmt: skip
    assert (done.outcome, done.finish_reason) == (Outcome.truncated, "turns")
    assert done.reward == 1.0


class FirstOnly(ScriptedEngine):
    """One answer; at the second call the episode's time is over."""

    limits: list[asyncio.Timeout]

    async def generate(self, prompt_ids: Any, *, sampling: Any, affinity: str = "") -> Any:
        if self._turns:
            self.limits[0].reschedule(asyncio.get_running_loop().time())
            await asyncio.Event().wait()
        return await super().generate(prompt_ids, sampling=sampling, affinity=affinity)


def test_the_time_limit_is_a_typed_outcome(
    tmp_path: Path, plain: EnvironmentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FirstOnly(byte_tokenizer(), ["echo fixed >answer"])
    engine.limits = []
    usual = asyncio.timeout

    def timeout(seconds: float | None) -> asyncio.Timeout:
        made = usual(seconds)
        if seconds == 987.0:  # the episode's
            engine.limits.append(made)
        return made

    monkeypatch.setattr(asyncio, "timeout", timeout)
    done = produce(tmp_path, plain, [], engine=engine, episode_seconds=987.0)
    assert (done.outcome, done.finish_reason) == (Outcome.agent_timeout, "time")
    assert done.reward == 1.0
    assert int(done.loss_mask.sum()) == len("echo fixed >answer") + 1


def test_a_failing_engine_is_not_the_agents_fault(tmp_path: Path, plain: EnvironmentSpec) -> None:
    done = produce(tmp_path, plain, ["true"])  # the script has no second answer
    assert (done.outcome, done.reward) == (Outcome.infrastructure_failure, None)
    assert "the script has 1 answers" in done.detail


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["sh", "-c", "echo no key in sight; exit 7"], "exit code 7: no key in sight"),
        (["no-such-program"], "no-such-program can't be started"),
    ],
)
def test_a_program_that_never_asks_is_a_mistake_of_the_recipe(
    tmp_path: Path, plain: EnvironmentSpec, command: list[str], words: str
) -> None:
    done = produce(tmp_path, plain, [], command=command)
    assert (done.outcome, done.reward) == (Outcome.infrastructure_failure, None)
    assert "never asked the model" in done.detail
    assert words in done.detail


def test_a_package_is_the_programs_alone(tmp_path: Path, isolated: EnvironmentSpec) -> None:
    """Its modules reach the program, and not what the program starts."""
    package = tmp_path / "package"
    (package / "bin").mkdir(parents=True)
    (package / "its_own.py").write_text(f"CLIENT = {CLIENT!r}\n")
    script = "#!/nowhere/bin/python3\nimport its_own\nexec(its_own.CLIENT)\n"
    (package / "bin" / "tool").write_text(script)
    answers = [
        "python3 -c 'import its_own' || echo fixed >answer",
        "touch /.prorl-harness/x",
        "stop",
    ]
    done = produce(
        tmp_path, isolated, answers, command=["tool", "{problem} {unknown}"], package=package
    )
    assert (done.outcome, done.reward) == (Outcome.scored, 1.0), done.detail
    assert "fix it {unknown}" in byte_tokenizer().decode(done.tokens)
    assert not (package / "x").exists()


def test_what_a_recipe_lacks_is_said(tmp_path: Path) -> None:
    recipe = make_recipe()
    recipe.tasks["sums"].agent = AgentKind.harness
    with pytest.raises(RecipeError, match=r"harness\.command"):
        check(recipe)
    recipe.tasks["sums"].harness.command = ["mini"]
    with pytest.raises(RecipeError, match=r"tasks\.sums\.environment"):
        check(recipe)


def test_the_shipped_recipe_and_a_package_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRORL_HARNESS", str(tmp_path / "nowhere"))
    assert main(["submit", "recipe=swe_harness", "--cfg"]) == 0
    task = yaml.safe_load(capsys.readouterr().out)["tasks"]["swe"]
    assert task["agent"] == "harness"
    assert task["harness"]["command"][0] == "mini"
    assert task["harness"]["package"] == str(tmp_path / "nowhere")
    assert set(task["harness"]["variables"].values()) >= {"true", "1", "True"}  # texts, all of them
    assert main(["submit", "recipe=swe_harness", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "tasks.swe.harness.package=" in said
    assert said.count("\n") == 1
