"""The wheel as users install it: packaged assets, and commands that find them without a checkout.

Built and unpacked by the build backend alone: no network, no pip, nothing installed.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASSETS = {
    name: sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    for name in ("recipes", "slurm_templates", "singularity")
}
"""Files of the checkout that a wheel must hold, by directory."""

BUILD = """
import sys
from hatchling.build import build_wheel
print(build_wheel(sys.argv[1]))
"""

pytest.importorskip("hatchling")


def run(argv: list[str], *, directory: Path, path: Path | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *argv], cwd=directory, env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    name = run(["-c", BUILD, str(directory)], directory=ROOT).split()[-1]
    return directory / name


@pytest.mark.process
@pytest.mark.parametrize("name", ASSETS)
def test_wheel_holds_the_assets(name: str, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert ASSETS[name]
    missing = [path for path in ASSETS[name] if f"prorl_hpc/_assets/{path}" not in held]
    if (ROOT / ".git").exists():  # what git ignores isn't the project's
        missing = [path for path in missing if not ignored(path)]
    assert not missing


def ignored(path: str) -> bool:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "check-ignore", "-q", path], timeout=60, check=False
    )
    return done.returncode == 0


@pytest.mark.process
def test_commands_work_from_the_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    where = ["-c", "import hpc, prorl_hpc; print(hpc.__file__, prorl_hpc.__file__)"]
    # The target stands before site-packages, where an editable install may point elsewhere.
    assert run(where, directory=tmp_path, path=target).count(str(target)) == 2
    listed = run(["-m", "prorl_hpc.cli", "list", "recipes"], directory=tmp_path, path=target)
    assert "quickstart" in listed
    argv = ["-m", "prorl_hpc.cli", "submit", "recipe=quickstart", "--dry-run"]
    assert "dry run: nothing was started" in run(argv, directory=tmp_path, path=target)
    scripts = tmp_path / "runs" / "quickstart" / "scripts"
    assert len(list(scripts.iterdir())) == 3
    text = (scripts / "learner.sbatch").read_text()
    assert str(ROOT) not in text.replace(sys.executable, "")
