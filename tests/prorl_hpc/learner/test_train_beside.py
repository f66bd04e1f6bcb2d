"""What the loop writes and reads beside training, against a fake buffer."""

import errno
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc.errors import EXIT_CONTINUE
from prorl_hpc.learner import loop, output, record, session, space
from prorl_hpc.learner.background import Line
from prorl_hpc.learner.checkpoint import checkpoint_steps, read_state
from prorl_hpc.learner.space import SpaceWait
from prorl_hpc.observe.metrics import MetricsWriter, read_metrics
from prorl_hpc.policy import latest_version
from tests.fakes.learner_client import FakeClient
from tests.prorl_hpc.disks import fill_disk, small_disk

from .conftest import make_run, tiny_recipe
from .loop_helpers import client, go, told, weights_hash


def test_what_is_validated_has_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long writing beside training takes: a crash must not validate a version twice."""
    recipe = tiny_recipe(max_staleness=50)
    recipe.learner.deterministic = False
    run = make_run(tmp_path / "run", recipe)
    fake = client()
    real, asked = output.write_checkpoint, threading.Event()

    def slow(*args: Any, **settings: Any) -> Path:
        asked.wait(timeout=0.5)  # a validation that is asked for before ends this wait, and fails
        return real(*args, **settings)

    def validate(version: int, counts: dict[str, int], num_rollouts: int) -> None:
        whole = version in (0, *checkpoint_steps(run))
        if version:
            asked.set()
        assert whole

    monkeypatch.setattr(output, "write_checkpoint", slow)
    fake.validate = validate  # type: ignore[method-assign]
    assert go(run, fake) == "done"
    assert asked.is_set()


def test_publishing_every_second_step_resumes_with_a_fresh_version(tmp_path: Path) -> None:
    recipe = tiny_recipe(max_staleness=2)
    recipe.steps = 6
    recipe.learner.deterministic = False
    recipe.learner.publish_every_steps = 2
    run = make_run(tmp_path / "run", recipe)
    fake = client()
    go(run, fake, stop=lambda: "now" if ("filtered", 0) in fake.calls else None)
    assert fake.version == 0
    again = client()
    assert go(run, again) == "done"
    assert told(again, "announce") == [(1, 8, 0, 1)]
    assert told(again, "published") == [2, 4, 5, 6]


def test_reading_publishing_and_saving_beside_training_change_nothing(tmp_path: Path) -> None:
    """Overlapped and stopped twice against the deterministic run; exports at their own steps."""
    recipe = tiny_recipe(max_staleness=0)
    whole = make_run(tmp_path / "whole", recipe)
    assert go(whole, client()) == "done"
    recipe.learner.deterministic = False
    recipe.learner.export_every_steps = 5
    recipe.algorithm.max_staleness = 50
    beside = make_run(tmp_path / "beside", recipe)
    for version in (3, 7):
        part = client()

        def stop(part: FakeClient = part, version: int = version) -> str | None:
            return "the walltime is near" if part.version >= version else None

        assert go(beside, part, stop=stop) == "the walltime is near"
    fake = client()
    assert go(beside, fake) == "done"
    assert weights_hash(beside, 12) == weights_hash(whole, 12)
    assert list(read_state(beside.checkpoint(12)).consumed.ranges) == [(0, 96)]
    assert told(fake, "published")[-1] == 12
    exported = sorted(path.name for path in (beside.root / "export").iterdir())
    assert exported == ["step-00000005", "step-00000010", "step-00000012"]


@pytest.mark.parametrize("what", ["policy", "checkpoint"])
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(
    "err", [OSError(errno.EIO, "Input/output error"), KeyError("lm_head.weight")]
)
def test_what_cannot_be_written_ends_training_with_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
    beside: bool,
    err: Exception,
) -> None:
    recipe = tiny_recipe(max_staleness=50 if beside else 0)
    recipe.learner.deterministic = not beside
    run = make_run(tmp_path / "run", recipe)

    def fail(*args: object, **settings: object) -> None:
        raise err

    place = {
        ("policy", True): "write_version",
        ("policy", False): "write_version",
        ("checkpoint", True): "write_checkpoint",
        ("checkpoint", False): "save_checkpoint",
    }[what, beside]
    monkeypatch.setattr(output, place, fail)
    code = session.guarded(lambda: go(run, client()))
    out, said = capsys.readouterr()
    if isinstance(err, OSError):
        assert code == EXIT_CONTINUE
        assert "stopping, to be started again: [Errno 5] Input/output error" in out
    else:
        assert code == 1
        (line,) = said.strip().splitlines()
        assert re.fullmatch(r"prorl-hpc: .* couldn't be written: KeyError: 'lm_head.weight'", line)
        assert "Traceback" in out  # where it comes from, in the log
    assert not [
        t for t in threading.enumerate() if t.name in ("publish", "checkpoint", "next-batch")
    ]


def test_an_error_beside_training_is_raised_at_the_next_look_once() -> None:
    line = Line(name="publish", beside=True)
    line.put(raising(ValueError("half a file")))
    deadline = time.monotonic() + 60
    with pytest.raises(ValueError, match="half a file"):
        while time.monotonic() < deadline:
            line.check()
    line.check()
    line.wait()


def raising(err: Exception) -> Callable[[], None]:
    def body() -> None:
        raise err

    return body


@pytest.mark.parametrize("beside", [True, False])
def test_a_full_disk_pauses_training_and_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    beside: bool,
) -> None:
    """Every third write of anything finds the disk full, and has space when it tries again."""
    monkeypatch.setattr(space, "RETRY_SECONDS", 0.01)
    recipe = tiny_recipe(max_staleness=50 if beside else 0)
    recipe.learner.deterministic = not beside
    whole = make_run(tmp_path / "whole", recipe)
    assert go(whole, client()) == "done"
    capsys.readouterr()
    for owner, name in (
        (output, "write_version"), (output, "write_checkpoint"), (output, "save_checkpoint"),
        (MetricsWriter, "write"), (record, "record"), (loop, "publish"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, now_and_then_full(getattr(owner, name)))
    run = make_run(tmp_path / "run", recipe)
    assert go(run, client()) == "done"
    assert weights_hash(run, 12) == weights_hash(whole, 12)
    steps = [row["step"] for row in read_metrics(run.metrics("learner")) if row["event"] == "step"]
    assert steps == list(range(1, 13))
    out = capsys.readouterr().out
    for what in ("policy version", "checkpoint of step", "a line of metrics", "progress"):
        assert re.search(f"the disk is full; .*{what}.* waits, and training with it", out)
        assert re.search(f"{what}.* is written after", out)


def now_and_then_full(real: Any) -> Any:
    calls = itertools.count()

    def call(*args: Any, **settings: Any) -> Any:
        if next(calls) % 3 == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **settings)

    return call


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", mib=24) as made:
        yield made


@pytest.mark.parametrize("victim", ["checkpoint", "policy", "line"])
def test_a_disk_that_is_really_full_leaves_nothing_half_made(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    victim: str,
) -> None:  # fmt: skip
    """Filled by somebody else just before one kind of write, who makes room when we wait."""
    monkeypatch.setattr(space, "RETRY_SECONDS", 0.01)
    recipe = tiny_recipe()
    run = make_run(disk / "run", recipe)
    ballast = disk / "ballast"
    owner, name, word = {
        "checkpoint": (output, "save_checkpoint", "checkpoint of step 4"),
        "policy": (output, "write_version", "policy version 1"),
        "line": (MetricsWriter, "write", "a line of metrics"),
    }[victim]
    real, pause = getattr(owner, name), SpaceWait._pause
    calls = itertools.count()

    def fill(*args: Any, **settings: Any) -> Any:
        if next(calls) == 0:
            fill_disk(ballast, spare_bytes=0 if victim == "line" else 40_000)
        return real(*args, **settings)

    def make_room(*args: Any, **settings: Any) -> bool:
        left = [p.name for p in run.root.rglob(".*.tmp")]
        assert left == []
        ballast.unlink(missing_ok=True)
        return bool(pause(*args, **settings))

    monkeypatch.setattr(owner, name, fill)
    monkeypatch.setattr(SpaceWait, "_pause", make_room)
    assert go(run, client()) == "done"
    out = capsys.readouterr().out
    assert f"the disk is full; {word} waits" in out
    assert latest_version(run) == 12
    rows = read_metrics(run.metrics("learner"))
    assert [row["step"] for row in rows if row["event"] == "step"] == list(range(1, 13))
