"""Whole runs of the pipeline on a real Slurm, as an ordinary user with a hostile directory."""

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc import ledger
from tests.prorl_hpc.run_helpers import RECIPES, ROOT, Session

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

HOSTILE = 'it\'s "so" $HOME `id` #1'
CLUSTER = [
    "site=minicluster",
    "learner.gpus_per_node=8",
    # A node each: no other job of the run fits beside it.
    "rollout.memory_mib=31500",
]


@dataclass(kw_only=True, slots=True)
class ClusterSession(Session):
    """A run of the recipe `tiny` on the cluster, driven as its user."""

    cluster: Any

    def cli(self, *arguments: str, code: int | None = 0) -> Any:
        done = self.cluster.run(
            [str(ROOT / ".venv/bin/python"), "-m", "prorl_hpc.cli", *arguments],
            env={"PRORL_RUN_ROOT": str(self.runs), "PYTHONPATH": str(ROOT)},
            timeout=600,
        )
        if code is not None:
            assert done.returncode == code, f"{arguments}: {done.stdout}{done.stderr}"
        return done

    def submit(self, *more: str, code: int | None = 0) -> Any:
        root = str(self.runs).replace('"', '\\"')
        command = ["submit", "recipe=tiny", *CLUSTER, f'run_root="{root}"', *self.overrides, *more]
        return self.cli(
            *command, "--recipe-dir", str(RECIPES), "--name", self.name, code=code
        )  # fmt: skip

    @property
    def is_supervised(self) -> bool:
        """Whether the learner may still go on."""
        return not any(end.next != "again" for end in self.ends("learner"))

    def starts(self, job: str) -> list[ledger.Start]:
        entries = ledger.read(self.run.ledger).entries
        return [e for e in entries if isinstance(e, ledger.Start) and e.job == job]

    def processes(self, role: str, index: int = 0) -> list[int]:
        """All processes of a role: those of every node are on this machine."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if f"prorl_hpc.{role}".encode() in words and bytes(self.run.root) in words:
                found.append(int(path.parent.name))
        return found

    def send(self, pid: int, number: signal.Signals) -> None:
        self.cluster.user.run(["kill", f"-{number}", str(pid)])  # gone already: no matter

    def newest(self, job: str, index: int = 0) -> ledger.Start:
        """The newest attempt of one task."""
        return [start for start in self.starts(job) if start.index == index][-1]

    def wait_all(self) -> None:
        """Waits until every job has ended by itself, with its work done."""
        for job, count in (("learner", 1), ("buffer", 1), ("rollout", 2)):
            self.wait(
                lambda job=job, count=count: sum(
                    end.next == "finished" for end in self.ends(job)
                ) == count,
                what=f"{job} has finished",
            )  # fmt: skip


@pytest.fixture
def session(cluster: Any) -> Iterator[ClusterSession]:
    base = cluster.user.new_directory("run") / HOSTILE
    made = ClusterSession(cluster=cluster, runs=base, name="tiny")
    yield made
    ids = [start.job_id for job in ("buffer", "rollout", "learner") for start in made.starts(job)]
    if ids:
        cluster.run(["scancel", "--quiet", *ids])


def test_a_run_with_preempted_rollout_tasks(session: ClusterSession) -> None:
    session.overrides = ["steps=40"]
    session.submit()
    assert "already started" in session.submit().stdout
    session.wait_step(2)
    learner = session.cluster.job(session.newest("learner").job_id)
    assert learner["Reservation"] == "h100"
    assert learner["TresPerNode"].endswith("gpu:h100:8")
    # Two whole nodes: the buffer's can't be had, so both rollout tasks must go.
    urgent = ("--partition=urgent", "--nodes=2", "--exclusive", "--time=5", "--mem=100")
    session.cluster.sbatch("sleep 1", *urgent, cwd=Path("/tmp"))
    session.wait(lambda: len(session.starts("rollout")) == 4, what="both tasks come back")
    session.wait_all()
    session.audit(steps=40, batch_groups=4)
    assert len(session.starts("buffer")) == len(session.starts("learner")) == 1
    assert {start.index for start in session.starts("rollout")} == {0, 1}
    assert f"run {session.name}: done" in session.cli("watch", session.name).stdout
    assert "step 40/40" in session.cli("status", session.name).stdout


def test_a_run_in_trouble(session: ClusterSession) -> None:
    """A rollout's node is cut off, its job lives on beside the successor until it is healed;
    another task is cancelled by hand; the learner is warned of its walltime."""
    steps = 60
    session.overrides = [f"steps={steps}"]
    session.submit()
    session.wait(lambda: len(session.starts("rollout")) == 2, what="both tasks run")
    cluster = session.cluster
    with session.held(2):
        first, second = (session.newest("rollout", index) for index in (0, 1))
        cluster.cut(first.host)
        assert cluster.run(["scancel", second.job_id]).returncode == 0
        session.wait(lambda: len(session.starts("rollout")) == 3, what="the task starts elsewhere")
    try:
        session.wait_step(4)  # with two copies of the task pushing
    finally:
        cluster.heal(first.host)
    with session.held(5):
        warned = cluster.run(
            ["scancel", "--signal=USR2", "--batch", session.newest("learner").job_id]
        )
        assert warned.returncode == 0, warned.stderr
    session.wait(lambda: len(session.starts("learner")) == 2, what="the learner chains on")
    session.wait(
        lambda: [end.next for end in session.ends("learner")][-1:] == ["finished"],
        what="the learner has finished",
    )
    session.audit(steps=steps, batch_groups=4)
    assert session.newest("rollout", 1).attempt == 1
    assert session.newest("rollout").attempt == 2  # nothing of the old copy called it back


def test_a_run_submitted_by_hand_loses_nodes(session: ClusterSession) -> None:
    """Queued with the sbatch lines of its README.txt; then slurmd, and all that it ran, dies under
    the learner and under a rollout task."""
    steps = 20
    session.overrides = [f"steps={steps}"]
    session.submit("--dry-run")
    assert not session.run.ledger.exists()
    ids: dict[str, str] = {}
    for line in session.run.readme.read_text().splitlines():
        if not line.startswith("    sbatch "):
            continue
        command = re.sub(r"<id of (\w+)>", lambda found: ids[found[1]], line.strip()).split()
        done = session.cluster.run(command, cwd=session.run.root)
        assert done.returncode == 0, done.stderr
        ids[Path(command[-1]).stem] = done.stdout.split()[-1]  # Submitted batch job 12
    assert list(ids) == ["buffer", "rollout", "learner"]
    session.wait_step(4)
    hosts = [session.newest(job).host for job in ("learner", "rollout")]
    assert session.newest("buffer").host not in hosts
    for host in hosts:
        session.cluster.crash(host)
    try:
        for host in hosts:
            session.wait(
                lambda host=host: session.cluster.node_state(host).startswith("down"),
                what=f"{host} is missed",
            )
    finally:
        for host in hosts:
            session.cluster.start_slurmd(host)
    session.wait_all()
    session.audit(steps=steps, batch_groups=4)
    assert [session.newest(job).attempt for job in ("learner", "rollout")] == [2, 2]
    assert len(session.starts("buffer")) == 1
