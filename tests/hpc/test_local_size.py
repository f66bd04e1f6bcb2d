"""One machine bears only so many tasks: a slip of the keyboard must not bring it down."""

from pathlib import Path

import pytest

from hpc import local, submit
from hpc.errors import SiteError
from hpc.prepare import check, prepare
from hpc.rundir import RunDirectory
from tests.hpc.plans import job, local_site, plan


def test_too_many_tasks_are_refused(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    many = plan(job("rollout", array_size=1000), directory=run.root)
    with pytest.raises(SiteError, match="1000 tasks of job 'rollout' are too many"):
        check(many, local_site())
    check(many, local_site(extra={"max_tasks": "1000"}))


def test_scaling_so_far_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "supervisor_pid", lambda run: 1)
    run = RunDirectory(tmp_path / "run")
    run.root.mkdir()
    prepare(run, plan=plan(job("rollout", array_size=2), directory=run.root),
            site=local_site())  # fmt: skip
    with pytest.raises(SiteError, match="at most 32"):
        submit.scale(run.root, "rollout", 1000)
    assert not run.desired("rollout").exists()
