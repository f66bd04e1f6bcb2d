"""A small bug with its own source releases, and a store that needs no network to build it."""

import hashlib
import io
import json
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from hpc.container_probe import probe
from prorl_hpc.choices import EnvironmentKind
from prorl_hpc.recipe import TaskConfig
from prorl_hpc.tasks.pypi_bugs import build_pypi, site_key
from prorl_hpc.tasks.swe.bug import Bug, read_bugs
from prorl_hpc.tasks.swe.store import InstanceStore
from prorl_hpc.tasks.swe.task import SweTask, open_swe

BUGGY = {
    "adder/__init__.py": "from adder.sums import add\n",
    "adder/sums.py": "def add(a, b):\n    return a - b\n",
    "adder/old.py": "GONE = True\n",
    "tests/test_add.py": "def test_nothing():\n    pass\n",
    "tests/test_same.py": "def test_same():\n    pass\n",
    "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef three():\n    return 3\n",
    "PKG-INFO": "Metadata-Version: 2.1\nName: adder\nVersion: 1.0\n",
    "README": "adds\n",
}
HIDDEN = """\
from adder import add


def test_adds(three):
    assert add(1, 2) == three


def test_zero():
    assert add(4, 0) == 4
"""
FIXED = {
    **BUGGY,
    "adder/sums.py": "def add(a, b):\n    return a + b\n",
    "tests/test_add.py": HIDDEN,
    "PKG-INFO": "Metadata-Version: 2.1\nName: adder\nVersion: 1.1\n",
    "README": "adds well\n",
}
del FIXED["adder/old.py"]


def sdist(path: Path, files: dict[str, str]) -> str:
    """Writes a source release; returns its digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{name}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def row(store: InstanceStore, **changes: Any) -> dict[str, Any]:
    """The line of the data set; its releases are where pip would have put them."""
    digests = {
        version: sdist(store.sdists / f"adder-{version}" / f"adder-{version}.tar.gz", files)
        for version, files in (("1.0", BUGGY), ("1.1", FIXED))
    }
    facts = {
        "instance_id": "adder-1.1", "package": "adder",
        "buggy_version": "1.0", "buggy_sdist_sha256": digests["1.0"],
        "fixed_version": "1.1", "fixed_sdist_sha256": digests["1.1"],
        "pip_requirements": [], "pythonpath": "", "source_paths": ["adder"],
        "test_paths": ["tests"], "exclude_suffixes": [],
        "test_command": ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider",
                         "tests/test_add.py"],
        "problem_statement": "`add(1, 2)` gives -1.",
        "FAIL_TO_PASS": ["tests/test_add.py::test_adds"],
        "PASS_TO_PASS": ["tests/test_add.py::test_zero"],
    }  # fmt: skip
    return facts | changes


def install_pytest(site: Path) -> None:
    """This interpreter's pytest, which is pure Python, as an instance's requirements."""
    for name in ("pytest", "pluggy", "iniconfig", "packaging"):
        for file in metadata.files(name) or ():
            if "__pycache__" not in file.parts and ".." not in file.parts:
                target = site / file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(Path(file.locate()).read_bytes())


def install_plugin(site: Path, source: str) -> None:
    """A plugin that this instance's pytest loads by itself, as an installed distribution's."""
    (site / "noisy_plugin.py").write_text(source)
    about = site / "noisy_plugin-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: noisy-plugin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[pytest11]\nnoisy = noisy_plugin\n")


def make_store(root: Path, *, plugin: str = "") -> tuple[InstanceStore, Path]:
    """A store with the bug built, and the data set that names it."""
    store = InstanceStore(root=root / "store")
    # two, because a task wants something to train on and something to validate with
    rows = [row(store), row(store, instance_id="adder-again")]
    data = root / "bugs.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in rows))
    for bug in read_bugs("swe", str(data)):
        assert bug.pypi is not None
        site = store.site(site_key(bug.pypi))
        if not site.exists():
            install_pytest(site)
            if plugin:
                install_plugin(site, plugin)
        build_pypi(bug, store)
    return store, data


def make_task(store: InstanceStore, data: Path, **options: Any) -> tuple[SweTask, Bug]:
    """The task over that store, in bubblewrap on this machine's /usr."""
    config = TaskConfig(
        kind="swe", data=str(data), environment=EnvironmentKind.bubblewrap, validation_size=1,
        score_timeout_seconds=300.0, options={"store": str(store.root), **options},
    )  # fmt: skip
    task = open_swe("swe", config, usable_only=False)
    return task, next(b for b in task.bugs() if b.instance_id == "adder-1.1")


def need_bubblewrap() -> None:
    """Skips where bubblewrap isn't to be had."""
    features = probe()
    if not features.bubblewrap_features:
        pytest.skip(f"bubblewrap can't be used here: {features.bubblewrap_error}")
