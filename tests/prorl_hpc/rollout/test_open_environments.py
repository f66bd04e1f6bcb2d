"""What is refused before any work is drawn or model loaded, and what only an attempt can tell."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from hpc.container_probe import probe
from hpc.errors import ImageError, IsolationError
from prorl_hpc.environment import Backend, EnvironmentSpec
from prorl_hpc.evaluation import evaluate
from prorl_hpc.rollout.environments import open_environments
from prorl_hpc.service import serve
from prorl_hpc.service.job import Where
from tests.fakes.environments import ShellTask
from tests.prorl_hpc.rollout.helpers import EchoTask, make_recipe


class InApptainer(ShellTask):
    def environment_spec(self, instance: Any) -> EnvironmentSpec:
        return EnvironmentSpec(backend=Backend.apptainer, image=Path("/images/swe.sif"))


class WithoutImage(ShellTask):
    def environment_spec(self, instance: Any) -> EnvironmentSpec:
        raise ImageError("image 'swe' is not in the store")


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PRORL_APPTAINER", raising=False)
    probe.cache_clear()
    yield tmp_path
    probe.cache_clear()


def test_a_machine_without_containers_is_refused_at_once(bare_machine: Path) -> None:
    with pytest.raises(IsolationError, match="install Apptainer"):
        open_environments(AsyncExitStack(), {"swe": InApptainer()}, bare_machine / "scratch")


def test_an_image_that_is_missing_is_for_an_attempt_to_tell(bare_machine: Path) -> None:
    made = open_environments(AsyncExitStack(), {"swe": WithoutImage()}, bare_machine / "scratch")
    assert made is not None


def test_tasks_without_environments_need_no_scratch(bare_machine: Path) -> None:
    assert open_environments(AsyncExitStack(), {"sums": EchoTask()}, bare_machine / "s") is None
    assert not (bare_machine / "s").exists()


@pytest.fixture
def only_the_task(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task that needs containers, and neither a tokenizer nor a model."""
    monkeypatch.setenv("PRORL_SCRATCH", str(bare_machine / "scratch"))
    for place in ("prorl_hpc.tasks.registry", "prorl_hpc.service.serve"):
        monkeypatch.setattr(f"{place}.make_tasks", lambda _: {"swe": InApptainer()})
    for place in ("prorl_hpc.agents.render", "prorl_hpc.service.serve"):
        monkeypatch.setattr(f"{place}.load_tokenizer", lambda _: None)
    for place in ("prorl_hpc.agents.registry", "prorl_hpc.service.serve"):
        monkeypatch.setattr(f"{place}.make_agent", lambda *_, **__: None)
    return bare_machine


def test_a_service_refuses_before_it_starts_its_engine(only_the_task: Path) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            where = Where(directory=only_the_task, policy=only_the_task)
            await serve._open_core(stack, make_recipe(), where)

    with pytest.raises(IsolationError, match="install Apptainer"):
        asyncio.run(main())


def test_an_evaluation_refuses_before_it_starts_its_engine(only_the_task: Path) -> None:
    sampling = evaluate._sample(
        make_recipe(), model=only_the_task, num_samples=1, scratch=only_the_task, report=None
    )
    with pytest.raises(IsolationError, match="install Apptainer"):
        asyncio.run(sampling)
