"""What a rollout node refuses before it draws any work, and what only an attempt can tell."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from hpc.container_probe import probe
from hpc.errors import ImageError, IsolationError
from prorl_hpc.environment import Backend, EnvironmentSpec
from prorl_hpc.rollout.node import open_environments
from tests.fakes.environments import ShellTask
from tests.prorl_hpc.rollout.helpers import EchoTask


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
