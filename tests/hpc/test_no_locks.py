"""File systems that refuse locks: some mounts of Lustre, NFS and DVS. The refusal is put in."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from hpc import ledger, local, submit
from hpc.errors import SubmitError
from hpc.prepare import prepare
from hpc.rundir import RunDirectory
from tests.hpc.fake_slurm import install
from tests.hpc.plans import job, local_site, plan, slurm_site


@pytest.fixture(params=[errno.ENOLCK, 524])
def number(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What every attempt to lock is answered with."""

    def refuse(descriptor: int, operation: int, *more: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    return int(request.param)


@pytest.mark.usefixtures("number")
def test_runs_on_slurm_need_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{tmp_path}/slurm/bin{os.pathsep}{os.environ['PATH']}")
    run = RunDirectory(tmp_path / "run")
    submit.launch(run.root, plan(job(), directory=run.root), slurm_site())
    assert len(fake.jobs()) == 1
    kinds = [type(entry) for entry in ledger.read(run.ledger).entries]
    assert kinds == [ledger.Intent, ledger.Submit]
    submit.resume(run.root)
    submit.cancel(run.root)
    assert len(fake.jobs()) == 1


def test_runs_on_this_machine_are_refused_in_one_line(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "run")
    prepare(run, plan=plan(job(), directory=run.root), site=local_site())
    assert local.main([str(run.root)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert os.strerror(number) in said
    with pytest.raises(SubmitError, match=r"without locks, .* choose another run_root"):
        submit.launch(run.root, plan(job(), directory=run.root), local_site())


def test_other_errors_of_a_lock_are_no_sign_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(OSError, match="Input/output"):
        submit.launch(run.root, plan(job(), directory=run.root), local_site())
    assert not run.ledger.exists()
