"""The store with a real runtime: offline builds, damage, a killed builder."""

import json
from pathlib import Path
from typing import Protocol

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
