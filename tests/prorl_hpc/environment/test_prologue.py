"""What a fresh shell is told: run by the machine's own bash."""

import subprocess
from pathlib import Path

import pytest

from prorl_hpc.environment import Backend, EnvironmentSpec
from prorl_hpc.environment.prologue import setup_script


def told(tmp_path: Path, command: str, **variables: str) -> str:
    """Standard output and error of a command after the set-up, by a shell without any locale."""
    spec = EnvironmentSpec(
        backend=Backend.process, image=None, directory=str(tmp_path), variables=variables
    )
    script = f"{setup_script(spec, home=str(tmp_path))}\n{command}"
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", script],
        env={"PATH": "/usr/bin:/bin"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=60, check=True,
    )  # fmt: skip
    return done.stdout.decode()


@pytest.mark.process
def test_a_locale_that_the_image_lacks_is_not_complained_about(tmp_path: Path) -> None:
    show = "bash -c 'echo $LC_ALL $LANG'"
    assert told(tmp_path, show, LC_ALL="xx_XX.UTF-8", LANG="yy_YY.UTF-8") == "C C\n"


@pytest.mark.process
def test_a_locale_that_the_image_has_stays(tmp_path: Path) -> None:
    assert told(tmp_path, "bash -c 'echo $LC_ALL'", LC_ALL="POSIX") == "POSIX\n"
    assert told(tmp_path, "echo $TEXT", TEXT="xx_XX.UTF-8") == "xx_XX.UTF-8\n"
