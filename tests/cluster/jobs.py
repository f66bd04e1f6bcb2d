"""Small jobs on the private Slurm, driven as its ordinary user; for the tests beside it."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hpc import ledger
from hpc.plan import Job, Plan, Resources
from hpc.rundir import RunDirectory
from hpc.site import Backend, Placement, Site
from tests.cluster.conftest import attempts, poll

DRIVER = """
import json, sys
from pathlib import Path
import msgspec
from hpc import status, submit
from hpc.errors import UserError
from hpc.plan import Plan
from hpc.site import Site
what, where, *rest = json.loads(sys.argv[1])
try:
    if what == "launch":
        plan = msgspec.convert(rest[0], Plan)
        submit.launch(Path(where), plan, msgspec.convert(rest[1], Site))
    elif what == "states":
        print(json.dumps([msgspec.to_builtins(s) for s in status.states(Path(where))]))
    else:
        getattr(submit, what)(Path(where), *rest)
except UserError as err:
    print(err, file=sys.stderr)
    sys.exit(2)
"""

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
asked = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda n, f: asked.append(n))
run = Path(os.environ["PRORL_RUN_DIR"])
me = f"{os.environ['PRORL_ROLE']}-{os.environ['PRORL_INDEX']}"
out = run / "out"
out.mkdir(exist_ok=True)
mode = sys.argv[1]
names = ("PRORL_ATTEMPT", "PRORL_DEADLINE", "CUDA_VISIBLE_DEVICES", "SLURM_NODEID", "HOSTILE",
         "SLURMD_NODENAME", "SLURM_JOB_END_TIME")
node = os.environ.get("SLURM_NODEID", "0")
text = "".join(f"{name}={os.environ.get(name, '')}\\n" for name in names)
(out / f"{me}.{os.environ['PRORL_ATTEMPT']}.{node}").write_text(text)
progress = run / "progress" / me
count = (int(progress.read_text()) if progress.exists() else 0) + 1
progress.write_text(str(count))
if mode == "once" or (mode == "steps" and count >= int(sys.argv[2])):
    sys.exit(0)
while not asked and not (run / "done").exists():
    time.sleep(0.05)
sys.exit(75 if asked else 0)
"""

HOSTILE = 'it\'s "so" $HOME `id` %j #1'


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run of a test, driven as the cluster's user."""

    cluster: Any
    run: RunDirectory
    program: Path
    python: str

    def command(self, *arguments: str) -> tuple[str, ...]:
        return (self.python, str(self.program), *arguments)

    def drive(self, what: str, *rest: object, env: dict[str, str] | None = None) -> str:
        text = json.dumps([what, str(self.run.root), *rest])
        done = self.cluster.run([self.python, "-c", DRIVER, text], timeout=400, env=env)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    def launch(
        self,
        *jobs: Job,
        setup: tuple[str, ...] = (),
        accounting: bool = False,
        **placements: Placement,
    ) -> None:
        plan = Plan(run="test run", run_directory=str(self.run.root), jobs=jobs)
        site = Site(
            name="minicluster",
            backend=Backend.slurm,
            placements={"default": Placement(partition="cpu"), **placements},
            accounting=accounting,
            max_array_size=self.cluster.max_array_size,
            setup=setup,
        )
        self.drive("launch", msgspec.to_builtins(plan), msgspec.to_builtins(site))

    def states(self, *, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
        return list(json.loads(self.drive("states", env=env)))

    def entries(self, kind: type) -> list[Any]:
        return [e for e in ledger.read(self.run.ledger).entries if isinstance(e, kind)]

    def starts(self, job: str) -> int:
        return sum(entry.job == job for entry in self.entries(ledger.Start))

    def ends(self, job: str, following: str) -> int:
        return sum(e.job == job and e.next == following for e in self.entries(ledger.Exit))

    def finish(self) -> None:
        done = self.cluster.user.run(["touch", str(self.run.root / "done")])
        assert done.returncode == 0

    def written(self, name: str) -> dict[str, str]:
        """What the program saw; it writes that a moment after its attempt was recorded."""
        path = self.run.root / "out" / name
        self.wait(lambda: path.exists() and path.read_text().endswith("\n"), what=f"{name} runs")
        return dict(line.split("=", 1) for line in path.read_text().splitlines())

    def said(self) -> str:
        """What everything wrote, for the message of a failed test."""
        logs = [p for p in self.run.logs.rglob("*") if p.suffix in (".out", ".log")]
        texts = [f"{path}:\n{path.read_text(errors='replace')[-1500:]}" for path in logs]
        return "\n".join([*texts, attempts(self.run), self.cluster.report()])

    def wait(self, ready: Callable[[], object], *, what: str, timeout: float = 400.0) -> None:
        try:
            poll(ready, what=what, timeout=timeout)
        except AssertionError as err:
            raise AssertionError(f"{err}\n{self.said()}") from err


def open_session(cluster: Any) -> Iterator[Session]:
    """A session in a hostile directory; what it queued is cancelled at its end."""
    base = cluster.user.new_directory("jobs")
    root = base / HOSTILE
    python = sys.executable
    program = base / "program.py"
    written = cluster.user.run(["bash", "-c", f"cat > {program} <<'END'\n{PROGRAM}\nEND"])
    assert written.returncode == 0, written.stderr
    made = Session(cluster=cluster, run=RunDirectory(root), program=program, python=python)
    yield made
    if root.exists():
        cluster.user.run(["touch", str(root / "stop"), str(root / "done")])
        ids = {entry.job_id for entry in made.entries(ledger.Submit)}
        ids |= {entry.job_id for entry in made.entries(ledger.Requeue)}
        if ids:
            cluster.run(["scancel", "--quiet", *ids])


def job(session: Session, name: str, *arguments: str, **changes: Any) -> Job:
    resources = {
        "nodes": changes.pop("nodes", 1),
        "cpus_per_node": changes.pop("cpus", 1),
        "memory_mib": 100,
        "gpus_per_node": changes.pop("gpus", 0),
        "walltime_minutes": changes.pop("minutes", 30),
    }
    settings = {"grace_seconds": 20, "role": name, **changes}
    return Job(
        name=name,
        command=session.command(*arguments),
        resources=Resources(**resources),
        **settings,
    )
