"""INIT, RUN, EVAL of single attempts, with real fakes for engine, verifier and environment."""

import asyncio
import threading

import pytest

from prorl_hpc.choices import AgentKind
from prorl_hpc.inference.engine import EngineError
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.records import Kind, Outcome, Score
from prorl_hpc.rollout.scoring import VerifierTimeout
from prorl_hpc.run import Run
from prorl_hpc.tasks.base import TaskError, VerifierError
from tests.fakes.environments import FakeEnvironment, ShellTask
from tests.prorl_hpc.agents.templates import byte_tokenizer
from tests.prorl_hpc.rollout.helpers import (
    EchoTask,
    LocalScorer,
    make_lease,
    make_pipeline,
    make_recipe,
    make_tokenizer,
)


def produce(tmp_path, engine=None, *, answers=("3",), lease=None, **parts):
    async def main():
        used = engine or ScriptedEngine(parts.get("tokenizer") or make_tokenizer(), list(answers))
        pipeline = make_pipeline(used, run=Run(tmp_path), **parts)
        return await asyncio.wait_for(pipeline.produce(lease or make_lease(), 2), 300)

    return asyncio.run(main())


def raising(error):
    async def before():
        raise error

    return before


def test_a_right_answer(tmp_path):
    done = produce(tmp_path)
    assert (done.reward, done.outcome, done.finish_reason) == (1.0, Outcome.scored, "stop")
    assert done.key == (7, 2)
    assert done.instance_id == "echo-3"
    # "say 3" and the separator, then "3" and eos
    assert done.loss_mask.tolist() == [0] * 6 + [1, 1]
    assert set(done.timings) == {"init", "run", "eval", "queue"}
    assert (done.worker, done.attempt) == ("rollout-0", 1)


def test_an_answer_that_is_cut_is_scored_as_it_stands(tmp_path):
    done = produce(tmp_path, answers=["3333333333"])
    assert (done.reward, done.outcome, done.finish_reason) == (0.0, Outcome.truncated, "length")
    assert int(done.loss_mask.sum()) == 6  # rollout.max_new_tokens


def test_an_empty_answer_is_invalid(tmp_path):
    done = produce(tmp_path, answers=[""])
    assert (done.reward, done.outcome) == (0.0, Outcome.invalid)


def test_a_lease_may_shorten_the_context(tmp_path):
    done = produce(tmp_path, lease=make_lease(context_tokens=4))
    assert (done.reward, done.outcome) == (0.0, Outcome.truncated)
    assert not done.loss_mask.any()


class BrokenEngine(ScriptedEngine):
    def __init__(self, error):
        super().__init__(make_tokenizer(), [])
        self._error = error

    async def generate(self, prompt_ids, *, sampling, affinity=""):
        raise self._error


@pytest.mark.parametrize("error", [EngineError("no memory\nleft"), ZeroDivisionError("a defect")])
def test_what_breaks_in_the_engine_is_an_infrastructure_failure(tmp_path, error):
    done = produce(tmp_path, BrokenEngine(error))
    assert (done.reward, done.outcome) == (None, Outcome.infrastructure_failure)
    assert done.detail.startswith("run: ")
    assert "\n" not in done.detail
    assert done.tokens.size == 0


class SilentEngine(ScriptedEngine):
    """Answers so many times, then never again."""

    async def generate(self, prompt_ids, *, sampling, affinity=""):
        try:
            return await super().generate(prompt_ids, sampling=sampling, affinity=affinity)
        except EngineError:
            await asyncio.Event().wait()


def test_an_engine_that_never_answers_is_no_fault_of_the_agent(tmp_path):
    engine = SilentEngine(make_tokenizer(), [])
    done = produce(tmp_path, engine, recipe=make_recipe(episode_seconds=0.05))
    assert done.outcome is Outcome.infrastructure_failure
    assert "no answer within" in done.detail


def test_a_verifier_that_fails_and_one_that_hangs(tmp_path):
    task = EchoTask()
    failed = produce(tmp_path, scorer=LocalScorer(task, before=raising(VerifierError("broken"))))
    assert failed.outcome is Outcome.infrastructure_failure
    hung = produce(tmp_path, scorer=LocalScorer(task, before=raising(VerifierTimeout("5 s"))))
    assert (hung.reward, hung.outcome) == (0.0, Outcome.invalid)
    assert hung.components == {"verifier_timeout": 1.0}


def test_a_score_that_is_no_number_costs_the_attempt_and_not_the_node(tmp_path):
    class Odd(EchoTask):
        def score(self, instance, response):
            return Score(reward=1.0, components={"share": float("nan")})

    done = produce(tmp_path, scorer=LocalScorer(Odd()))
    assert done.outcome is Outcome.infrastructure_failure
    assert "component share=nan" in done.detail


def test_an_instance_that_cannot_be_made(tmp_path):
    class Broken(EchoTask):
        def instance(self, index, *, kind):
            raise TaskError("too few")

    done = produce(tmp_path, task=Broken())
    assert done.outcome is Outcome.infrastructure_failure
    assert done.detail.startswith("init: ")
    assert done.instance_id == "#3"


def test_a_task_that_is_not_in_the_recipe(tmp_path):
    done = produce(tmp_path, lease=make_lease(task="other"))
    assert done.outcome is Outcome.infrastructure_failure


def bash(command):
    return f"```bash\n{command}\n```"


def shell(tmp_path, answers, *, episode_seconds=60.0, engine=ScriptedEngine, agent=AgentKind.bash):
    recipe = make_recipe(episode_seconds=episode_seconds, max_new_tokens=100)
    recipe.model.context_tokens = 10_000
    recipe.tasks["sums"].agent = agent
    recipe.tasks["sums"].max_turns = 10
    task, made, tokenizer = ShellTask(), [], byte_tokenizer()

    def make(spec):
        made.append(FakeEnvironment())
        return made[-1]

    done = produce(
        tmp_path,
        engine(tokenizer, answers),
        recipe=recipe,
        task=task,
        tokenizer=tokenizer,
        make_environment=make,
    )
    assert all(environment.closed for environment in made)
    return done, task, made


def test_an_environment_task_is_scored_in_a_fresh_environment(tmp_path):
    done, task, made = shell(tmp_path, [bash("fix"), bash("submit")])
    assert (done.reward, done.outcome) == (1.0, Outcome.scored)
    assert len(made) == 2
    assert task.scored_with == [made[1]]
    assert done.isolation["overridden"] == "container"


def test_an_agent_without_commands_gets_no_environment(tmp_path):
    done, task, made = shell(tmp_path, ["my answer"], agent=AgentKind.single_turn)
    assert (done.reward, done.outcome) == (0.0, Outcome.scored)
    assert task.scored_with == made
    assert len(made) == 1
    assert done.isolation["overridden"] == "container", "that of the scoring environment"


def test_an_image_is_compared_beside_the_loop(tmp_path, monkeypatch):
    """Reading a large image takes minutes; heartbeats and other attempts must not wait for it."""
    threads = []
    original = ShellTask.environment_spec

    def slow(self, instance):
        threads.append(threading.current_thread())
        return original(self, instance)

    monkeypatch.setattr(ShellTask, "environment_spec", slow)
    shell(tmp_path, [bash("submit")])
    assert threads[0] is not threading.main_thread()


def test_an_agent_that_kills_its_environment_is_invalid(tmp_path):
    done, _, made = shell(tmp_path, [bash("fix"), bash("die")])
    assert (done.reward, done.outcome, done.finish_reason) == (0.0, Outcome.invalid, "error")
    assert len(made) == 1
    assert int(done.loss_mask.sum()) > 0


def test_a_sandbox_that_is_lost_is_an_infrastructure_failure(tmp_path):
    done, _, _ = shell(tmp_path, [bash("lost")])
    assert (done.reward, done.outcome) == (None, Outcome.infrastructure_failure)


def test_an_episode_that_takes_too_long_is_scored_with_what_there_is(tmp_path):
    done, _, _ = shell(tmp_path, [bash("fix")], episode_seconds=4.0, engine=SilentEngine)
    assert (done.reward, done.outcome, done.finish_reason) == (1.0, Outcome.agent_timeout, "time")


def test_each_stage_keeps_its_bound(tmp_path):
    class Slow(ScriptedEngine):
        async def generate(self, prompt_ids, *, sampling, affinity=""):
            seen.append(pipeline.occupied["run"])
            await asyncio.sleep(0)
            return await super().generate(prompt_ids, sampling=sampling, affinity=affinity)

    seen = []

    async def main():
        nonlocal pipeline
        engine = Slow(make_tokenizer(), lambda prompt, affinity: "3")
        pipeline = make_pipeline(
            engine, run=Run(tmp_path), recipe=make_recipe(init_workers=1, run_workers=2)
        )
        lease = make_lease(kind=Kind.validation)
        return await asyncio.gather(*(pipeline.produce(lease, i) for i in range(12)))

    pipeline = None
    done = asyncio.run(main())
    assert all(t.reward == 1.0 for t in done)
    assert max(seen) <= 2
    assert set(pipeline.occupied.values()) == {0}


def test_cancelling_closes_the_environment(tmp_path):
    made = []

    def make(spec):
        made.append(FakeEnvironment())
        return made[-1]

    async def main():
        recipe = make_recipe()
        recipe.model.context_tokens = 10_000
        recipe.tasks["sums"].agent = AgentKind.bash
        tokenizer = byte_tokenizer()
        pipeline = make_pipeline(
            SilentEngine(tokenizer, []),
            run=Run(tmp_path),
            recipe=recipe,
            task=ShellTask(),
            tokenizer=tokenizer,
            make_environment=make,
        )
        task = asyncio.create_task(pipeline.produce(make_lease(), 0))
        while not pipeline.occupied["run"]:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(main(), 300))
    assert made[0].closed


def test_training_draws_by_temperature_alone(tmp_path):
    """The learner divides by probabilities of the whole distribution: no top-p, no top-k."""
    asked = []

    class Noting(ScriptedEngine):
        async def generate(self, prompt_ids, *, sampling, affinity=""):
            asked.append(sampling)
            return await super().generate(prompt_ids, sampling=sampling, affinity=affinity)

    recipe = make_recipe()
    recipe.algorithm.temperature, recipe.validation.top_p = 1.3, 0.8
    for kind in (Kind.train, Kind.validation):
        engine = Noting(make_tokenizer(), ["3"])
        produce(tmp_path, engine, recipe=recipe, lease=make_lease(kind=kind))
    drawn = [(one.temperature, one.top_p, one.top_k) for one in asked]
    assert drawn == [(1.3, 1.0, 0), (0.0, 0.8, 0)]
