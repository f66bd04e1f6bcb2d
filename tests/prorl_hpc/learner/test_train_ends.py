"""How the loop ends: bounds, culprits, exit codes; against a fake buffer."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hpc.errors import EXIT_CONTINUE, EXIT_DONE, EXIT_USER
from prorl_hpc.buffer.keys import make_keys
from prorl_hpc.buffer.messages import BufferGone, Fenced, GroupIds, GroupRef
from prorl_hpc.learner import session
from prorl_hpc.learner.algorithm_error import AlgorithmError
from prorl_hpc.learner.checkpoint import checkpoint_steps, read_state
from prorl_hpc.learner.collect import NoBatch
from prorl_hpc.learner.link import StopWanted, explain, open_line, patience
from prorl_hpc.learner.train import TrainError
from prorl_hpc.learner.validate import ValidationLine, read_validations, run_validation
from prorl_hpc.policy import latest_version, read_manifest
from prorl_hpc.run import Run

from .conftest import make_run, tiny_recipe
from .loop_helpers import client, go


def test_no_batch_within_the_bound_says_so(tmp_path: Path) -> None:
    recipe = tiny_recipe()
    recipe.learner.batch_seconds = 0.05
    run = make_run(tmp_path / "run", recipe)
    fake = client()
    fake.take = lambda num_groups, *, timeout_seconds: []  # type: ignore[method-assign]
    with pytest.raises(NoBatch, match=r"0 of 8 groups came within learner.batch_seconds=0.05"):
        go(run, fake)


def test_a_draining_buffer_ends_in_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_recipe())
    fake = client()
    real = fake.take

    def take(num_groups: int, *, timeout_seconds: float) -> list[GroupRef]:
        if fake.version < 3:
            return real(num_groups, timeout_seconds=timeout_seconds)
        fake.phase = "draining"
        return []

    fake.take = take  # type: ignore[method-assign]
    assert go(run, fake) == "the buffer is stopping"
    assert checkpoint_steps(run) == [3]


def gone(*args: object, **settings: object) -> None:
    raise BufferGone("no answer from the buffer")


def test_a_lost_buffer_ends_in_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_recipe())
    fake = client()
    real = fake.take

    def take(num_groups: int, *, timeout_seconds: float) -> list[GroupRef]:
        return real(num_groups, timeout_seconds=timeout_seconds) if fake.version < 3 else gone()  # type: ignore[func-returns-value,return-value]

    fake.take = take  # type: ignore[method-assign]
    with pytest.raises(BufferGone):
        go(run, fake)
    assert checkpoint_steps(run) == [3]


@pytest.mark.parametrize("pending", [False, True])
def test_the_last_step_needs_no_buffer(tmp_path: Path, pending: bool) -> None:
    """Whether or not its validation is still to come; a policy that is missing is published."""
    recipe = replace(tiny_recipe(), steps=2)
    run = make_run(tmp_path / "run", recipe)
    fake = client()
    if pending:
        fake.validation_results = lambda version, timeout_seconds=0.0: (  # type: ignore[method-assign]
            gone() if version == 2 else []
        )
    assert go(run, fake) == "done"
    again = client()
    again.announce = gone  # type: ignore[method-assign]
    if pending:
        state = read_state(run.checkpoint(2))
        assert state.decided_step < 2
    shutil.rmtree(run.policy(2))
    assert go(run, again) == "done"
    assert latest_version(run) == 2
    assert read_manifest(run.policy(2)).step == 2


def test_a_stop_ends_every_wait_for_a_buffer_that_is_not_there(tmp_path: Path) -> None:
    """With the real client and nobody at the other end, far within its patience."""
    run = make_run(tmp_path / "run", tiny_recipe())
    make_keys(run)
    asked = []

    def stopping() -> bool:
        asked.append(True)
        return len(asked) > 2

    line = open_line(run, attempt=1, patience_seconds=3600.0, stopping=stopping)
    try:
        with pytest.raises(StopWanted, match="its job never started"):
            line.announce(0, consumed=GroupIds(), filtered=0, step=0)
    finally:
        line.close()


def test_a_stop_while_the_buffer_is_silent_ends_in_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny_recipe())
    fake = client()
    real = fake.take

    def take(num_groups: int, *, timeout_seconds: float) -> list[GroupRef]:
        if fake.version < 3:
            return real(num_groups, timeout_seconds=timeout_seconds)
        fake.phase = "silent"
        raise StopWanted("a stop is wanted")

    fake.take = take  # type: ignore[method-assign]
    stop = lambda: "got SIGTERM" if fake.phase == "silent" else None  # noqa: E731
    assert go(run, fake, stop=stop) == "got SIGTERM"
    assert checkpoint_steps(run) == [3]


def test_patience_is_short_once_there_is_nothing_to_ask() -> None:
    recipe = tiny_recipe()
    assert patience(recipe, is_over=False) == 600.0
    assert patience(recipe, is_over=True) == 30.0
    assert "its job never started" in str(explain(Run(Path("nowhere")), BufferGone("gone")))


def test_a_validation_that_does_not_come_back_has_no_score(tmp_path: Path) -> None:
    recipe = tiny_recipe()
    recipe.steps, recipe.learner.batch_seconds = 1, 0.5
    run = make_run(tmp_path / "run", recipe)
    fake = client()
    fake.validation_results = lambda version, timeout_seconds=0.0: None  # type: ignore[method-assign]
    assert go(run, fake) == "done"
    lines = read_validations(run.validation)
    assert [line.score for line in lines] == [None, None]
    assert "learner.batch_seconds=0.5" in lines[0].note


def test_a_task_that_came_back_without_a_result_leaves_no_score(tmp_path: Path) -> None:
    """The others' mean alone would look like a gain or a loss, and the reset controller acts."""
    recipe = tiny_recipe()
    recipe.tasks["hard"] = replace(recipe.tasks["letters"], validation_size=3)
    fake = client()
    line = run_validation(
        recipe, source=fake, read=fake.read, step=1, version=1, stopping=lambda: False
    )
    assert isinstance(line, ValidationLine)
    assert line.score is None
    assert set(line.tasks) == {"letters"}
    assert "no score: none of hard came back" in line.note
    del recipe.tasks["hard"]
    line = run_validation(
        recipe, source=fake, read=fake.read, step=1, version=1, stopping=lambda: False
    )
    assert isinstance(line, ValidationLine)
    assert line.score is not None


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (AlgorithmError("bad"), EXIT_USER),
        (NoBatch("nobody"), EXIT_CONTINUE),
        (BufferGone("gone"), EXIT_CONTINUE),
        (OSError(28, "No space left"), EXIT_CONTINUE),
        (Fenced("older"), EXIT_CONTINUE),
        (TrainError("stuck"), 1),
    ],
)
def test_how_it_ends_as_an_exit_code(
    problem: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> str:
        raise problem

    assert session.guarded(body) == code
    out, err = capsys.readouterr()
    assert str(problem) in out + err
    assert "Traceback" not in out + err


def test_done_and_stopped_as_exit_codes() -> None:
    assert session.guarded(lambda: "done") == EXIT_DONE
    assert session.guarded(lambda: "the walltime is near") == EXIT_CONTINUE


def test_programming_errors_are_not_hidden() -> None:
    def body() -> str:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        session.guarded(body)
