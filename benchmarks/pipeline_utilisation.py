"""How busy the inference slots are: with stage pools or without, stale jobs swept or not.

The real pipeline and the real job queue on a virtual clock; environments, model and scoring only
take their time. Times are heavy-tailed (log-normal) around those of software-engineering rollouts:
tens of turns whose actions take 0.42 s, minutes of preparing and testing. Prints one table. The
limit is a slot that always decodes for a rollout that is used. Published for a 14B model on eight
H100 (arXiv 2603.18815): 78 % utilisation whole, 42 % without load balancing, 65 % without
stale-job clean-up; hardware and workload differ, only the direction compares.

    python benchmarks/pipeline_utilisation.py [--groups 48] [--steps 3]
"""

import argparse
import asyncio
import random
import selectors
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hpc.isolation import Isolation
from prorl_hpc.agents.characters import build_character_tokenizer
from prorl_hpc.agents.single_turn import SingleTurn
from prorl_hpc.choices import EnvironmentKind
from prorl_hpc.environment.base import Backend, EnvironmentSpec
from prorl_hpc.inference.scripted import ScriptedEngine
from prorl_hpc.recipe import ModelConfig, Recipe, RolloutConfig, TaskConfig
from prorl_hpc.records import Instance, Kind, Message, Score
from prorl_hpc.rollout.pipeline import Parts
from prorl_hpc.rollout.versions import Versions
from prorl_hpc.run import Run
from prorl_hpc.service.core import Core
from prorl_hpc.service.jobs import Bounds, Jobs
from prorl_hpc.service.schema import JobRequest
from prorl_hpc.service.store import JobStore, StoredJob

SLOTS = 32
"""Conversations that the inference servers can hold."""

SAMPLES = 8
TASK = "bugs"
MEDIANS = {"init": 40.0, "run": 180.0, "eval": 60.0}
"""Seconds."""
SPREADS = {"init": 0.7, "run": 0.8, "eval": 0.9}
"""Standard deviations of the logarithm: the slowest of a hundred runs takes over six medians."""

ISOLATION = Isolation(
    backend="process", runtime_version="0", user_namespace=False, pid_namespace=False,
    network_none=False, own_root=False, writable_layer="none", memory_limit="none",
    process_limit="none", overridden=(),
)  # fmt: skip


class Jump(selectors.SelectSelector):
    """Instead of waiting, time jumps."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events:
            assert timeout is not None, "everything waits for ever"
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is the selector's; threads would miss it, so there are none."""

    def __init__(self) -> None:
        self._jump = Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # noqa: ARG002
        future = self.create_future()
        future.set_result(func(*args))
        return future


def seconds(stage: str, key: str) -> float:
    """The same rollout takes as long in every way of running it."""
    rng = random.Random(f"{stage}/{key}")
    return MEDIANS[stage] * rng.lognormvariate(0.0, SPREADS[stage])


class Sandbox:
    """Takes its time to start."""

    isolation = ISOLATION

    def __init__(self, delay: float) -> None:
        self._delay = delay

    async def __aenter__(self) -> Self:
        await asyncio.sleep(self._delay)
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class InSandbox(SingleTurn):
    """One request to the engine stands for all turns."""

    needs_environment = True


class Bugs:
    """A task whose environments and tests take their time; the engine below is the model."""

    name = TASK

    def __init__(self) -> None:
        self._count = 0

    def size(self, kind: Kind) -> int:  # noqa: ARG002
        return 10_000

    def instance(self, index: int, *, kind: Kind) -> Instance:  # noqa: ARG002
        messages = (Message(role="user", content="mend it"),)
        return Instance(task=TASK, instance_id=f"bug-{index}", index=index, messages=messages)

    def environment_spec(self, instance: Instance) -> EnvironmentSpec:  # noqa: ARG002
        return EnvironmentSpec(backend=Backend.process, image=None)

    async def setup(self, instance: Instance, environment: Any) -> None:
        pass

    async def result(self, instance: Instance, environment: Any) -> bytes:  # noqa: ARG002
        return b""

    def score(self, instance: Instance, response: str) -> Score:
        raise NotImplementedError

    async def score_in(self, instance: Instance, **_: Any) -> Score:
        self._count += 1
        await asyncio.sleep(seconds("eval", f"{instance.index}/{self._count}"))
        return Score(reward=1.0)


class Model(ScriptedEngine):
    """Decodes for as long as the rollout's turns take; counts busy slot-seconds."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, lambda *_: "done")
        self.busy: dict[str, float] = {}
        """Slot-seconds by rollout."""

    async def generate(self, prompt_ids: Any, *, sampling: Any, affinity: str = "") -> Any:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await asyncio.sleep(seconds("run", affinity))
        finally:
            self.busy[affinity] = self.busy.get(affinity, 0.0) + loop.time() - began
        return await super().generate(prompt_ids, sampling=sampling, affinity=affinity)


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way of running rollouts."""

    name: str
    pools: bool
    """Stages have places of their own; else a worker takes a rollout through all of them."""
    sweep: bool
    """Jobs that the step no longer needs are cancelled."""
    spare: int
    """Groups asked for beyond those that a step needs."""


WAYS = (
    Way(name="workers, no spare groups", pools=False, sweep=False, spare=0),
    Way(name="pools, no spare groups", pools=True, sweep=False, spare=0),
    Way(name="pools, spare groups left at work", pools=True, sweep=False, spare=16),
    Way(name="pools, spare groups swept", pools=True, sweep=True, spare=16),
)


def make_core(directory: Path, way: Way) -> tuple[Core, Model]:
    tokenizer = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz ")
    ahead = SLOTS if way.pools else 0
    rollout = RolloutConfig(
        max_new_tokens=50, init_workers=ahead or SLOTS, run_workers=SLOTS,
        eval_workers=ahead or SLOTS, environment_seconds=1e6, episode_seconds=1e6,
    )  # fmt: skip
    config = TaskConfig(
        kind="logic", environment=EnvironmentKind.process, score_timeout_seconds=1e6
    )
    recipe = Recipe(
        name="utilisation", steps=1, tasks={TASK: config}, rollout=rollout,
        model=ModelConfig(context_tokens=200),
    )  # fmt: skip
    model = Model(tokenizer)
    numbers = iter(range(10**9))
    parts = Parts(
        recipe=recipe,
        tasks={TASK: Bugs()},
        agents={TASK: InSandbox()},
        tokenizer=tokenizer,
        engine=model,
        versions=Versions(model, run=Run(directory)),
        scorer=None,  # type: ignore[arg-type]
        make_environment=lambda _: Sandbox(seconds("init", str(next(numbers)))),  # type: ignore[arg-type,return-value]
        worker="bench",
        attempt=1,
        clock=lambda: asyncio.get_running_loop().time(),
    )
    return Core(parts), model


async def train(directory: Path, way: Way, *, num_groups: int, num_steps: int) -> dict[str, float]:
    """Steps that wait for `num_groups` groups each; the next is asked for when one is full."""
    core, model = make_core(directory, way)
    store = JobStore(directory / "jobs.sqlite")
    # With pools, rollouts being prepared and tested don't hold a slot of the model.
    capacity = 3 * SLOTS if way.pools else SLOTS
    jobs = Jobs(store, produce=core.produce, bounds=Bounds(capacity=capacity))
    jobs.start()
    loop = asyncio.get_running_loop()
    began, used, number = loop.time(), 0.0, 0
    for _ in range(num_steps):
        waiting: dict[asyncio.Task[None], StoredJob] = {}
        for _ in range(num_groups + way.spare):
            request = JobRequest(task=TASK, index=number, num_samples=SAMPLES)
            stored = jobs.submit(request)
            number += 1
            waiting[asyncio.create_task(jobs.wait(stored.id, seconds=1e9))] = stored
        done: set[asyncio.Task[None]] = set()
        while len(done) < num_groups:
            ready, _ = await asyncio.wait(set(waiting) - done, return_when=asyncio.FIRST_COMPLETED)
            done |= ready
        for task, stored in waiting.items():
            if task in done:
                used += sum(model.busy.get(f"{stored.number}-{n}", 0.0) for n in range(SAMPLES))
            elif way.sweep:
                await jobs.cancel(stored.id)
            task.cancel()
    spent = loop.time() - began
    busy = sum(model.busy.values())
    await jobs.close()
    store.close()
    return {
        "seconds": spent / num_steps,
        "busy": min(busy, SLOTS * spent) / (SLOTS * spent),
        "used": used / (SLOTS * spent),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=48, help="that a step needs")
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    print(f"{SLOTS} slots, steps of {given.groups} groups of {SAMPLES}; virtual time\n")
    print(f"{'way':34} {'s a step':>9} {'slots busy':>11} {'on used rollouts':>17}")
    for way in WAYS:
        with tempfile.TemporaryDirectory() as scratch:
            loop = VirtualLoop()
            try:
                found = loop.run_until_complete(
                    train(Path(scratch), way, num_groups=given.groups, num_steps=given.steps)
                )
            finally:
                loop.close()
        print(f"{way.name:34} {found['seconds']:9.0f} {found['busy']:11.0%} {found['used']:17.0%}")


if __name__ == "__main__":
    main()
