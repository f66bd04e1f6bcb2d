"""The local backend: the real scripts as supervised processes, killed and cancelled."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc import groups, ledger, local, status, submit
from hpc import supervisor as supervisor_module
from hpc.errors import PlanError, RunNotFound, SubmitError
from hpc.journal import claim_attempt
from hpc.plan import Job
from hpc.prepare import prepare
from hpc.rundir import RunDirectory
from hpc.site import Site
from hpc.supervisor import Supervisor
from hpc.task import Phase as TaskPhase
from hpc.task import Task
from tests.hpc.plans import HOSTILE, job, local_site, plan, resources

pytestmark = pytest.mark.process

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
asked = []
mode = sys.argv[1]
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN if mode == "deaf" else lambda n, f: asked.append(n))
run = Path(os.environ["PRORL_RUN_DIR"])
me = f"{os.environ['PRORL_ROLE']}-{os.environ['PRORL_INDEX']}"
progress = run / "progress" / me
count = (int(progress.read_text()) if progress.exists() else 0) + 1
progress.write_text(str(count))
(run / f"pid-{me}").write_text(str(os.getpid()))
if mode == "fail":
    sys.exit(3)
if mode == "steps":
    sys.exit(0 if count >= int(sys.argv[2]) else 75)
parent = os.getppid()
while not asked and not (run / "done").exists():
    time.sleep(0.02)
sys.exit(75 if asked else 0)
"""


def wait(ready: Callable[[], object], *, what: str, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.02)


def work(name: str, *arguments: str, **changes: object) -> Job:
    values = {"grace_seconds": 5, **changes}
    return job(name, sys.executable, "-c", PROGRAM, *arguments, **values)


def phases(run: RunDirectory) -> list[str]:
    return [str(state.phase) for state in status.states(run)]


def starts(run: RunDirectory, name: str) -> int:
    entries = ledger.read(run.ledger).entries
    return sum(isinstance(entry, ledger.Start) and entry.job == name for entry in entries)


def exits(run: RunDirectory, name: str) -> list[ledger.Exit]:
    entries = ledger.read(run.ledger).entries
    return [entry for entry in entries if isinstance(entry, ledger.Exit) and entry.job == name]


def pid_of(run: RunDirectory, me: str) -> int:
    path = run.root / f"pid-{me}"
    wait(lambda: path.exists() and path.read_text().isdigit(), what=f"{me} runs")
    return int(path.read_text())


def dead(pid: int) -> bool:
    known = groups.stat(pid)
    return known is None or known.state in "ZX"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    made = RunDirectory(tmp_path / HOSTILE)
    yield made
    if made.root.exists():
        made.stop_request.touch()
        local.notify(made, number=signal.SIGTERM)
        assert local.wait_gone(made, seconds=90)


def launch(run: RunDirectory, *jobs: Job, site: Site | None = None) -> None:
    submit.launch(run.root, plan(*jobs, directory=run.root), site or local_site())


def test_a_run_to_its_end(run: RunDirectory) -> None:
    jobs = (
        work("buffer", "wait"),
        work("rollout", "wait", array_size=2, after=("buffer",)),
        work("learner", "steps", "3", after=("buffer",)),
    )
    launch(run, *jobs)
    launch(run, *jobs)  # nothing doubled
    wait(lambda: exits(run, "learner") and exits(run, "learner")[-1].code == 0, what="learner ends")
    (run.root / "done").touch()
    wait(lambda: set(phases(run)) == {"finished"}, what="all finish")
    assert [end.code for end in exits(run, "learner")] == [75, 75, 0]
    assert starts(run, "rollout") == 2
    assert local.wait_gone(run, seconds=60)
    submits = [e for e in ledger.read(run.ledger).entries if isinstance(e, ledger.Submit)]
    assert [entry.job for entry in submits] == ["buffer", "rollout", "learner"]
    submit.resume(run.root)  # a finished run has nothing to start
    assert local.wait_gone(run, seconds=60)
    assert starts(run, "learner") == 3


def test_peers_that_do_not_end_are_ended(run: RunDirectory) -> None:
    launch(
        run,
        work("buffer", "wait"),
        work("learner", "steps", "1", after=("buffer",)),
        site=local_site(extra={"linger_seconds": "0.2"}),
    )
    assert local.wait_gone(run, seconds=90)
    buffer, learner = status.states(run)
    assert (buffer.phase, learner.phase) == ("cancelled", "finished")
    assert "the run is over" in buffer.reason


def test_killed_command_comes_back(run: RunDirectory) -> None:
    launch(run, work("rollout", "wait", array_size=1))
    os.kill(pid_of(run, "rollout-0"), signal.SIGKILL)
    wait(lambda: starts(run, "rollout") == 2, what="it is started again")
    assert exits(run, "rollout")[0].reason == "killed by SIGKILL"


def test_killed_script_leaves_no_command_behind(run: RunDirectory) -> None:
    launch(run, work("rollout", "wait", array_size=1))
    first = pid_of(run, "rollout-0")
    known = groups.stat(first)
    assert known is not None
    os.kill(known.group, signal.SIGKILL)  # the script leads the group
    wait(lambda: starts(run, "rollout") == 2, what="it is started again")
    assert dead(first)
    assert [end.code for end in exits(run, "rollout")] == [137]


def test_end_belongs_to_the_attempt_that_ended(run: RunDirectory) -> None:
    launch(run, work("learner", "wait"))
    pid_of(run, "learner-0")
    foreign = claim_attempt(run, "learner", index=0)  # another copy of the task comes up
    assert foreign == 2
    (run.root / "done").touch()
    assert local.wait_gone(run, seconds=90)
    assert starts(run, "learner") == 1
    assert phases(run) == ["finished"]


def test_application_error_is_final(run: RunDirectory) -> None:
    launch(run, work("learner", "fail"))
    assert local.wait_gone(run, seconds=90)
    (state,) = status.states(run)
    assert (state.phase, state.reason) == ("failed", "exit code 3")
    assert starts(run, "learner") == 1


def test_walltime_starts_a_new_attempt(run: RunDirectory) -> None:
    # one minute of walltime, of which 58 s are grace: the warning comes after two seconds
    chain = work("learner", "wait", resources=resources(walltime_minutes=1), grace_seconds=58)
    launch(run, chain)
    wait(lambda: starts(run, "learner") == 2, what="the second attempt")
    assert exits(run, "learner")[0].asked == "USR2"
    assert exits(run, "learner")[0].next == "again"


def test_cancel_and_resume(run: RunDirectory) -> None:
    launch(run, work("buffer", "wait"), work("learner", "wait", after=("buffer",)))
    pid_of(run, "buffer-0")
    pid_of(run, "learner-0")
    submit.cancel(run.root)
    assert local.wait_gone(run, seconds=90)
    assert phases(run) == ["cancelled", "cancelled"]
    with pytest.raises(SubmitError, match="was cancelled"):
        launch(run, work("buffer", "wait"), work("learner", "wait", after=("buffer",)))
    submit.resume(run.root)
    wait(lambda: phases(run) == ["running", "running"], what="both run again")
    (run.root / "done").touch()
    wait(lambda: phases(run) == ["finished", "finished"], what="both finish")
    assert {end.attempt for end in exits(run, "learner")} == {1, 2}


def test_a_deaf_command_is_killed(run: RunDirectory) -> None:
    launch(run, work("learner", "deaf", grace_seconds=1))
    pid = pid_of(run, "learner-0")
    submit.cancel(run.root)
    assert local.wait_gone(run, seconds=90)
    assert dead(pid)
    assert phases(run) == ["cancelled"]


def test_killed_supervisor_takes_everything_along(run: RunDirectory) -> None:
    launch(run, work("buffer", "wait"), work("learner", "deaf", after=("buffer",), grace_seconds=1))
    pids = [pid_of(run, "buffer-0"), pid_of(run, "learner-0")]
    supervisor = local.supervisor_pid(run)
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    wait(lambda: all(dead(pid) for pid in pids), what="the commands end")
    assert local.wait_gone(run, seconds=60)
    assert set(phases(run)) == {"unknown"}
    submit.resume(run.root)
    wait(lambda: phases(run) == ["running", "running"], what="both run again")


def test_scale_up_and_down(run: RunDirectory) -> None:
    launch(run, work("rollout", "wait", array_size=1))
    pid_of(run, "rollout-0")
    submit.scale(run.root, "rollout", 3)
    wait(lambda: phases(run) == ["running"] * 3, what="three run")
    submit.scale(run.root, "rollout", 1)
    wait(lambda: phases(run) == ["running", "cancelled", "cancelled"], what="two leave")
    submit.scale(run.root, "rollout", 2)
    wait(lambda: phases(run)[1] == "running", what="one comes back")
    with pytest.raises(PlanError, match="'learner' is no array"):
        submit.scale(run.root, "learner", 2)
    with pytest.raises(PlanError, match="at least 1"):
        submit.scale(run.root, "rollout", 0)


def test_a_request_to_stop_is_heard_between_starts(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancel that comes while a long list of tasks is being started starts no more of them."""
    run.root.mkdir()
    made = plan(work("rollout", "wait", array_size=5), directory=run.root)
    prepare(run, plan=made, site=local_site())
    supervisor = Supervisor(run=run, plan=made, site=local_site())
    supervisor.enlist(time.time())
    start = supervisor_module.Supervisor._start

    def start_then_cancel(self: Supervisor, task: Task, now: float) -> None:
        start(self, task, now)
        if task.index == 1:
            submit.cancel(run.root)

    monkeypatch.setattr(supervisor_module.Supervisor, "_start", start_then_cancel)
    assert supervisor.serve() == 0
    assert {task.phase for task in supervisor.tasks} == {TaskPhase.stopped}
    started = [task.index for task in supervisor.tasks if task.token]
    assert started == [0, 1]


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE, errno.ENOSPC])
def test_a_process_that_cannot_be_started_yet_is_started_later(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A full process table or disk as one task starts doesn't end the others."""
    run.root.mkdir()
    made = plan(work("learner", "steps", "1"), directory=run.root)
    prepare(run, plan=made, site=local_site())
    supervisor = Supervisor(run=run, plan=made, site=local_site())
    supervisor.enlist(time.time())
    refusals = [OSError(number, os.strerror(number))] * 2
    real = supervisor_module.subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        if command[0] == "bash" and refusals:
            raise refusals.pop()
        return real(command, **options)

    monkeypatch.setattr(supervisor_module.subprocess, "Popen", popen)
    assert supervisor.serve() == 0
    assert not refusals
    assert [task.phase for task in supervisor.tasks] == [TaskPhase.finished]


def test_all_are_stopped_although_nothing_can_be_recorded(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.root.mkdir()
    made = plan(work("rollout", "wait", array_size=3), directory=run.root)
    prepare(run, plan=made, site=local_site())
    supervisor = Supervisor(run=run, plan=made, site=local_site())
    supervisor.enlist(time.time())

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(supervisor_module, "record_cancel", full)
    submit.cancel(run.root)
    assert supervisor.serve() == 0
    assert {task.phase for task in supervisor.tasks} == {TaskPhase.stopped}


def test_resume_while_a_killed_supervisors_jobs_still_end(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "SETTLE_SECONDS", 0.0)
    launch(run, work("learner", "deaf", grace_seconds=2))
    pid_of(run, "learner-0")
    supervisor = local.supervisor_pid(run)
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    wait(lambda: local.supervisor_pid(run) is None, what="it is dead, its guardian isn't")
    with pytest.raises(SubmitError, match="is still ending after 2 s; try again"):
        submit.resume(run.root)
    assert local.wait_gone(run, seconds=90)
    submit.resume(run.root)
    wait(lambda: starts(run, "learner") == 2, what="it runs again")


def test_no_watchdog_outlives_its_command(run: RunDirectory) -> None:
    run.root.mkdir()
    made = plan(work("learner", "wait", grace_seconds=900), directory=run.root)
    (script,) = prepare(run, plan=made, site=local_site())
    process = subprocess.Popen(["bash", script], start_new_session=True)
    command = pid_of(run, "learner-0")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 75
    assert dead(command)
    # The script's other children have just been told to end.
    wait(lambda: not groups.members(process.pid), what="nothing of its group lives", seconds=60)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("module load nowhere  # of old", "module load nowhere # of old"),
        ("source setup.sh", ""),
        ("source setup.sh && false", "source setup.sh && false"),
    ],
)
def test_setup_that_fails_ends_the_job(run: RunDirectory, line: str, said: str) -> None:
    run.root.mkdir()
    # What fails inside a sourced file is its own business.
    (run.root / "setup.sh").write_text("false\n[ -e /nowhere ] && false\ntrue\n")
    site = local_site(setup=("module() { return 1; }", line, "export AFTER=1"))
    launch(run, work("learner", "steps", "1"), site=site)
    assert local.wait_gone(run, seconds=90)
    (state,) = status.states(run)
    if not said:
        assert state.phase == "finished"
        return
    assert (state.phase, state.attempt) == ("failed", 1)
    assert state.reason.startswith("site.setup failed on ")
    assert state.reason.endswith(f": {said}")
    assert len(exits(run, "learner")) == 1


def test_chunks_run_with_their_offset(run: RunDirectory) -> None:
    launch(run, work("rollout", "steps", "1", array_size=3), site=local_site(max_array_size=2))
    wait(lambda: phases(run) == ["finished"] * 3, what="all finish")
    assert sorted(path.name for path in run.scripts.iterdir()) == [
        "rollout.chunk-1.sbatch",
        "rollout.sbatch",
    ]


def test_the_scripts_run_by_hand(run: RunDirectory) -> None:
    run.root.mkdir()
    (script,) = prepare(run, plan=plan(work("learner", "steps", "2"), directory=run.root),
                        site=local_site())  # fmt: skip
    codes = [subprocess.run(["bash", script], timeout=300).returncode for _ in range(2)]
    assert codes == [75, 0]
    assert "scripts/learner.sbatch" in run.readme.read_text()


def test_no_run(tmp_path: Path) -> None:
    for command in (submit.cancel, submit.resume, status.states):
        with pytest.raises(RunNotFound, match="is no run directory"):
            command(tmp_path)
