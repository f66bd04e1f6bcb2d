"""Every check of a sandbox, the attacks too, as an ordinary user on real runtimes."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from hpc.cgroups import group_paths, probe_place
from tests.prorl_hpc.environment import checks
from tests.prorl_hpc.environment.checks import ALL, APPTAINER, DESTRUCTIVE, ISOLATING

pytestmark = pytest.mark.timeout(1200)

SCRIPT = Path(checks.__file__).resolve()


class Person(Protocol):
    name: str
    env: dict[str, str]

    def run(self, argv: list[str], *, timeout: float = ..., env: dict[str, str] | None = ...
            ) -> "Done": ...  # fmt: skip


class Done(Protocol):
    returncode: int
    stdout: str
    stderr: str


class Container(Protocol):
    user: Person
    rootfs: Path
    sif: Path


def run(person: Person, backend: str, image: object, name: str) -> None:
    # bare environment: nothing of the tests' own reaches the user
    done = person.run(
        ["python", "-B", str(SCRIPT), backend, str(image), name], timeout=1000.0,
        env={"PRORL_CYCLES": os.environ.get("PRORL_CYCLES", "100")},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.process
@pytest.mark.parametrize("name", ALL | APPTAINER)
def test_unpacked_directory(apptainer: Container, name: str) -> None:
    run(apptainer.user, "apptainer", apptainer.rootfs, name)


SIF_CHECKS = [
    "state_persists", "files_travel_both_ways", "a_killed_worker_leaves_nothing", "many_at_once",
    "everything_is_removed", "a_full_disk_is_stopped", "signals_to_everyone_stay_inside",
]  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("name", SIF_CHECKS)
def test_sif(apptainer: Container, name: str) -> None:
    run(apptainer.user, "apptainer", apptainer.sif, name)


# the other checks run on bubblewrap in tests/prorl_hpc/environment
@pytest.mark.process
@pytest.mark.parametrize("name", ["files_travel_both_ways", *ISOLATING, *DESTRUCTIVE])
def test_bubblewrap(apptainer: Container, name: str) -> None:
    probe = apptainer.user.run(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"])
    if probe.returncode != 0:
        pytest.skip(
            "bubblewrap isn't installed or may not be used here: apt-get install bubblewrap"
        )
    run(apptainer.user, "bubblewrap", apptainer.rootfs, name)


@pytest.fixture
def delegated(apptainer: Container) -> Iterator[str]:
    """Groups of the kernel's that belong to the user, as a site would delegate them; a shell
    script that enters them."""
    place = probe_place()
    if place is None or os.geteuid() != 0:
        pytest.skip("control groups can't be made and given to a user here")
    groups = group_paths(place, f"prorl-delegated-{os.getpid()}")
    for group in groups:
        group.mkdir()
        for path in (group, *(group / name for name in ("cgroup.procs", "tasks"))):
            if path.exists():
                shutil.chown(path, apptainer.user.name)
    enter = " && ".join(f"echo $$ > {group}/cgroup.procs" for group in groups)
    yield enter
    for group in groups:
        for left in sorted(group.iterdir()):
            assert not left.is_dir(), f"{left} is left"
        group.rmdir()


@pytest.mark.process
@pytest.mark.parametrize("backend", ["apptainer", "bubblewrap"])
@pytest.mark.parametrize(
    "name",
    ["the_kernel_limits_it", "much_memory_is_stopped", "a_fork_bomb_is_stopped",
     "a_killed_worker_leaves_nothing"],
)  # fmt: skip
def test_delegated_control_groups(
    apptainer: Container, delegated: str, backend: str, name: str
) -> None:
    argv = ["python", "-B", str(SCRIPT), backend, str(apptainer.rootfs), name]
    inner = shlex.join(["runuser", "-u", apptainer.user.name, "--", "env", "-i",
                        *(f"{k}={v}" for k, v in apptainer.user.env.items()), *argv])  # fmt: skip
    done = subprocess.run(
        ["sh", "-c", f"{delegated} && cd / && exec {inner}"], capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
