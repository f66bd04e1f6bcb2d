"""How busy the RUN stage is: the pipeline with real containers against sequential loops.

    python benchmarks/run_utilisation.py [--image IMAGE.sif|DIRECTORY] [--attempts 48] [--workers 8]

The model is simulated: each answer takes a time drawn from a log-normal distribution. Everything
else is real: an environment is started per attempt, commands run in it, and a second one scores.
Peers: the same attempts one after another, and in as many loops side by side as RUN has places,
each INIT, RUN, EVAL in turn. RUN is busy by the places that are taken, from the first moment at
which all are until the last attempt enters: the end, where there is nothing left to do, isn't
counted. Target: at least 95 %, and twice the throughput of the sequential loop. Run it as an
ordinary user.
"""

import argparse
import asyncio
import string
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from hpc.errors import HpcError
from prorl_hpc.agents.characters import build_character_tokenizer
from prorl_hpc.agents.replay import Replay
from prorl_hpc.environment import Backend, Environment, EnvironmentFactory, EnvironmentSpec
from prorl_hpc.inference.engine import Completion, Sampling
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.recipe import AlgorithmConfig, ModelConfig, Recipe, RolloutConfig, TaskConfig
from prorl_hpc.records import Instance, Kind, Lease, Message, Outcome, Score, Trajectory
from prorl_hpc.rollout.pipeline import Parts, Pipeline
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.run import Run
from prorl_hpc.tasks.environment_task import MakeEnvironment

TASK = "bench"
COMMANDS = ("ls / > /dev/null", "i=0; while [ $i -lt 500 ]; do i=$((i+1)); done; echo $i")
INIT_WORKERS = 4
SAMPLE_SECONDS = 0.02


class SimulatedEngine(ScriptedEngine):
    """Answers one letter after a while; as many at once as are asked."""

    def __init__(self, tokenizer: Any, *, mean_seconds: float) -> None:
        super().__init__(tokenizer, lambda _prompt, _affinity: "x")
        self._rng = np.random.default_rng(7)
        self._mean = mean_seconds

    async def generate(
        self, prompt_ids: tuple[int, ...], *, sampling: Sampling, affinity: str = ""
    ) -> Completion:
        sigma = 0.6
        await asyncio.sleep(float(self._rng.lognormal(np.log(self._mean) - sigma**2 / 2, sigma)))
        return await super().generate(prompt_ids, sampling=sampling, affinity=affinity)


class CountingReplay(Replay):
    """Counts the attempts that came to RUN."""

    entered = 0

    async def run(self, *given: Any, **named: Any) -> None:
        self.entered += 1
        await super().run(*given, **named)


class ContainerTask:
    """Opens one environment for the agent and one for the score."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.name = TASK
        self._spec = spec

    def size(self, kind: Kind) -> int:  # noqa: ARG002
        return 1

    def instance(self, index: int, *, kind: Kind) -> Instance:  # noqa: ARG002
        messages = (Message(role="user", content="work"),)
        return Instance(task=TASK, instance_id="work", index=index, messages=messages)

    def score(self, instance: Instance, response: str) -> Score:
        raise NotImplementedError(instance.instance_id + response)

    def environment_spec(self, instance: Instance) -> EnvironmentSpec:  # noqa: ARG002
        return self._spec

    async def setup(self, instance: Instance, environment: Environment) -> None:  # noqa: ARG002
        await environment.run("mkdir -p /tmp/work && cd /tmp/work", 60.0)

    async def result(self, instance: Instance, environment: Environment) -> bytes:  # noqa: ARG002
        return (await environment.run("echo done", 60.0)).output

    async def score_in(
        self, instance: Instance, *, result: bytes, response: str,  # noqa: ARG002
        make_environment: MakeEnvironment,
    ) -> Score:  # fmt: skip
        async with make_environment(self._spec) as environment:
            done = await environment.run("echo done", 60.0)
        return Score(reward=float(done.output == result))


def make_pipeline(
    spec: EnvironmentSpec, factory: EnvironmentFactory, *, workers: int, turns: int,
    mean_seconds: float, root: Path,
) -> Pipeline:  # fmt: skip
    tokenizer = build_character_tokenizer(string.printable)
    engine = SimulatedEngine(tokenizer, mean_seconds=mean_seconds)
    script = [COMMANDS[turn % len(COMMANDS)] for turn in range(turns)]
    task = TaskConfig(kind=TASK, max_turns=turns + 1, validation_size=1)
    recipe = Recipe(
        name="bench", steps=1, tasks={TASK: task}, model=ModelConfig(context_tokens=4096),
        algorithm=AlgorithmConfig(batch_groups=1, num_rollouts=2),
        rollout=RolloutConfig(
            init_workers=INIT_WORKERS, run_workers=workers, eval_workers=INIT_WORKERS,
            max_new_tokens=4,
        ),
    )  # fmt: skip
    agent = CountingReplay(lambda *_: script, render=lambda ids, _said: list(ids[:1]))
    return Pipeline(Parts(
        recipe=recipe, tasks={TASK: ContainerTask(spec)}, agents={TASK: agent},
        tokenizer=tokenizer, engine=engine, versions=Versions(engine, run=Run(root / "run")),
        scorer=None, make_environment=factory.create, worker="bench", attempt=1,  # type: ignore[arg-type]
    ))  # fmt: skip


async def watch(pipeline: Pipeline, *, places: int, attempts: int, taken: list[int]) -> None:
    """Notes how many places of RUN are taken, in the window that counts."""
    agent = pipeline._parts.agents[TASK]
    assert isinstance(agent, CountingReplay)
    while pipeline.occupied["run"] < places:
        await asyncio.sleep(SAMPLE_SECONDS)
    while agent.entered < attempts:
        taken.append(pipeline.occupied["run"])
        await asyncio.sleep(SAMPLE_SECONDS)


async def work(
    pipeline: Pipeline, *, attempts: int, at_once: int, places: int
) -> tuple[float, float]:
    """(wall seconds, share of RUN's places that were taken), `at_once` attempts at any time."""
    lease = Lease(
        lease_id=1, group_id=1, kind=Kind.train, task=TASK, instance_index=0, rollouts=(0,),
        num_rollouts=attempts, seed=1, policy_version=None, deadline_seconds=3600.0,
    )  # fmt: skip
    numbers, done, taken = iter(range(attempts)), list[Trajectory](), list[int]()

    async def loop() -> None:
        for number in numbers:
            done.append(await pipeline.produce(lease, number))

    began = time.monotonic()
    watcher = asyncio.create_task(watch(pipeline, places=places, attempts=attempts, taken=taken))
    try:
        await asyncio.gather(*(loop() for _ in range(at_once)))
    finally:
        watcher.cancel()
    wall = time.monotonic() - began
    bad = [one.detail for one in done if one.outcome is not Outcome.scored or one.reward != 1.0]
    if bad:
        raise HpcError(f"{len(bad)} attempts failed: {bad[0]}")
    return wall, sum(taken) / (places * max(len(taken), 1))


async def measure(given: argparse.Namespace) -> None:
    image: Path | None = given.image
    backend = Backend.bubblewrap if image is None else Backend.apptainer
    spec = EnvironmentSpec(backend=backend, image=image)
    print(f"{backend}, {given.workers} places in RUN, {given.turns} turns of "
          f"{given.mean_seconds:g} s in the mean, {given.attempts} attempts")  # fmt: skip
    print(f"{'':<26}{'attempts/min':>13}{'RUN busy':>10}{'speed':>8}")
    first = None
    with tempfile.TemporaryDirectory(prefix="prorl-bench-", dir="/var/tmp") as name:
        root = Path(name)
        factory = EnvironmentFactory(root / "scratch")
        try:
            for title, workers, at_once, attempts in (
                ("one after another", 1, 1, max(2, given.attempts // given.workers)),
                ("sequential loops", given.workers, given.workers, given.attempts),
                ("pipeline", given.workers, given.workers + 2 * INIT_WORKERS, given.attempts),
            ):
                pipeline = make_pipeline(
                    spec, factory, workers=workers, turns=given.turns,
                    mean_seconds=given.mean_seconds, root=root,
                )  # fmt: skip
                wall, busy = await work(
                    pipeline, attempts=attempts, at_once=at_once, places=workers
                )
                rate = 60 * attempts / wall
                first = first or rate
                print(f"{title:<26}{rate:>13.1f}{busy:>10.1%}{rate / first:>7.1f}x", flush=True)
        finally:
            factory.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--image", type=Path)
    parser.add_argument("--attempts", type=int, default=48)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--mean-seconds", type=float, default=0.5)
    try:
        asyncio.run(measure(parser.parse_args()))
    except HpcError as err:
        print(err, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
