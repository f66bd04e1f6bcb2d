"""The store with a real runtime: offline builds, damage, a killed builder."""

import json
from pathlib import Path
from typing import Any, Protocol

import pytest

pytestmark = pytest.mark.timeout(1200)

SCRIPT = Path(__file__).resolve().with_name("image_steps.py")


class Container(Protocol):
    user: "Person"
    rootfs: Path


class Person(Protocol):
    def run(self, argv: list[str], *, timeout: float = ...) -> "Done": ...


class Done(Protocol):
    returncode: int
    stdout: str
    stderr: str


@pytest.mark.process
def test_a_session_of_an_admin(apptainer: Container) -> None:
    done = apptainer.user.run(["python", "-B", str(SCRIPT), str(apptainer.rootfs)], timeout=1000.0)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["digests"] == 1
    assert told["verified"] == ["", ""]
    assert told["swe"].startswith("git version")
    assert told["unpacked"] == "/testbed"
    assert "last words" in told["failed"]
    assert told["killed"] == [".leases", "base.sif", "images.lock", "killed.sif", "swe.sif"]
    assert told["truncated"].startswith("DigestMismatch")
    assert told["started"].startswith("SandboxStartError")
    assert told["scratch"] == []


DEFINITION = "Bootstrap: localimage\nFrom: {base}.sif\n%post\n  echo {name} > /etc/made-of\n"


@pytest.mark.process
def test_builds_over_an_array_of_the_cluster(cluster: Any, apptainer: Any) -> None:
    """Two images, the second from the first, then both asked for again by two at once."""
    root: Path = cluster.user.new_directory("builds")
    env = {"PRORL_IMAGES": str(root / "store")}

    def call(*arguments: str) -> Any:
        argv = ["python", "-m", "prorl_hpc.cli", "images", *arguments]
        return cluster.run(argv, cwd=root, env=env, timeout=900.0)

    done = call("import", "root", str(apptainer.sif))
    assert done.returncode == 0, done.stderr
    text = DEFINITION.format(base="root", name="first")
    write = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    assert cluster.run(["python", "-c", write, str(root / "a.def"), text]).returncode == 0
    built = call("build", "first", str(root / "a.def"), "--site", "minicluster")
    assert built.returncode == 0, built.stdout + built.stderr
    assert "first: " in built.stdout
    again = call("build", "first", str(root / "a.def"), "--site", "minicluster", "--at-once", "2")
    assert again.stdout == built.stdout, "found, not built"
    made = apptainer.run(["exec", str(root / "store/first.sif"), "cat", "/etc/made-of"])
    assert made.stdout.strip() == "first", made.stderr
    broken = text + "  exit 3\n"
    assert cluster.run(["python", "-c", write, str(root / "b.def"), broken]).returncode == 0
    failed = call("build", "second", str(root / "b.def"), "--site", "minicluster")
    assert failed.returncode == 1
    assert "second: FAILED: build from" in failed.stdout
    kept = call("verify")
    assert kept.stdout.split() == ["first:", "as", "locked", "root:", "as", "locked"]
