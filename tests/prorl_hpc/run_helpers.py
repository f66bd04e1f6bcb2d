"""Whole runs on this machine, driven as a user would: by the command line alone."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpc import ledger, local
from hpc.groups import members
from prorl_hpc.buffer.manifest import Closed, live_shards, valid_lines
from prorl_hpc.buffer.messages import VALIDATION_BASE
from prorl_hpc.buffer.shard import OpenShard
from prorl_hpc.learner.checkpoint import LearnerState, checkpoint_steps, read_state
from prorl_hpc.run import Run

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "tests" / "recipes"
DEADLINE_SECONDS = 700.0


@dataclass(kw_only=True, slots=True)
class Session:
    """One run of the recipe `tiny`, or of another one."""

    runs: Path
    """Where run directories lie."""
    name: str
    recipe: str = "tiny"
    overrides: list[str] = field(default_factory=list)

    @property
    def run(self) -> Run:
        return Run(self.runs / self.name)

    def cli(self, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Runs `prorl-hpc ARGUMENTS`; checks its exit code unless `code` is None."""
        done = subprocess.run(
            [sys.executable, "-m", "prorl_hpc.cli", *arguments],
            env=os.environ
            | {
                "PRORL_RUN_ROOT": str(self.runs),
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
        )
        if code is not None:
            assert done.returncode == code, f"{arguments}: {done.stdout}{done.stderr}{self.said()}"
        return done

    def submit(self, *more: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        root = f'run_root="{_quoted(self.runs)}"'
        return self.cli(
            "submit", f"recipe={self.recipe}", "site=local", root, *self.overrides, *more,
            "--recipe-dir", str(RECIPES), "--name", self.name,
            code=code,
        )  # fmt: skip

    # ---- what is going on

    @property
    def step(self) -> int:
        """Steps that the learner has done."""
        try:
            return int(float(self.run.progress("learner", index=0).read_text()))
        except (OSError, ValueError):
            return 0

    @property
    def is_supervised(self) -> bool:
        return local.supervisor_pid(self.run) is not None

    def ends(self, job: str) -> list[ledger.Exit]:
        entries = ledger.read(self.run.ledger).entries
        return [e for e in entries if isinstance(e, ledger.Exit) and e.job == job]

    def wait(self, ready: Callable[[], object], *, what: str) -> None:
        """Polls until `ready`; the failure shows what every process said."""
        until = time.monotonic() + DEADLINE_SECONDS
        while not ready():
            assert time.monotonic() < until, f"waited in vain: {what}\n{self.said()}"
            time.sleep(0.02)

    def wait_end(self) -> None:
        self.wait(lambda: not self.is_supervised, what="the run ends")

    def wait_step(self, step: int) -> None:
        """Waits until the learner has done so many steps; fails when the run ended before."""
        self.wait(lambda: self.step >= step or not self.is_supervised, what=f"step {step}")
        assert self.step >= step, f"the run ended before step {step}\n{self.said()}"

    def said(self) -> str:
        """The last words of every process."""
        texts = []
        for path in sorted(self.run.logs.rglob("*")):
            if path.suffix in (".out", ".log") and path.stat().st_size:
                texts.append(f"{path}:\n{path.read_text(errors='replace')[-2000:]}")
        return "\n".join(texts)

    # ---- violence

    def processes(self, role: str, index: int = 0) -> list[int]:
        """The living processes of one task: its script and all that the script started."""
        return members(self.leader(role, index))

    def leader(self, role: str, index: int = 0) -> int:
        """The task's newest script; -1 before its first."""
        label = f"{role}[{index}] started as process "
        try:
            lines = (self.run.logs / "supervisor.log").read_text().splitlines()
        except OSError:
            return -1
        started = [int(line.rsplit(" ", 1)[1]) for line in lines if label in line]
        return started[-1] if started else -1

    def wait_processes(self, role: str, index: int = 0) -> list[int]:
        """Waits until the command of the task's script runs."""
        found: list[int] = []

        def runs() -> bool:
            found[:] = [
                pid
                for pid in self.processes(role, index)
                if f"prorl_hpc.{role}" in _command_line(pid) and "bash" not in _command_line(pid)
            ]
            return bool(found)

        self.wait(runs, what=f"{role}[{index}] runs")
        return found

    def kill(self, role: str, index: int = 0, *, whole: bool = False) -> None:
        """kill -9 of the role's program, or of its script too (as a lost node would)."""
        doomed = self.wait_processes(role, index)
        if whole:
            doomed = self.processes(role, index)
        for pid in doomed:
            self.send(pid, signal.SIGKILL)

    def signal_script(self, role: str, number: signal.Signals, index: int = 0) -> None:
        """Signals a task's script, as Slurm does, once its program runs."""
        self.wait_processes(role, index)
        os.kill(self.leader(role, index), number)

    def kill_supervisor(self) -> None:
        """kill -9 of the supervisor; its guardian ends all that it ran."""
        pid = local.supervisor_pid(self.run)
        assert pid is not None, self.said()
        os.kill(pid, signal.SIGKILL)

    def send(self, pid: int, number: signal.Signals) -> None:
        """Signals a process; one that is gone is no error."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    @contextlib.contextmanager
    def held(self, step: int) -> Iterator[None]:
        """From `step` on the learner stands still during the block: the run can't end meanwhile."""
        self.wait_step(step)
        stopped = self.wait_processes("learner")
        for pid in stopped:
            self.send(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                self.send(pid, signal.SIGCONT)

    def end(self) -> None:
        """Leaves nothing running; for the end of a test."""
        if self.is_supervised:
            self.run.stop_request.touch()
            local.notify(self.run, number=signal.SIGTERM)
        local.wait_gone(self.run, seconds=120)

    # ---- what came of it

    def state(self) -> LearnerState:
        """The learner's newest checkpoint."""
        return read_state(self.run.checkpoint(checkpoint_steps(self.run)[-1]))

    def weights(self) -> str:
        """sha256 of the last published policy."""
        version = json.loads(self.run.latest_policy.read_text())["version"]
        path = self.run.policy(version) / "model.safetensors"
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def rows(self, event: str) -> list[dict[str, object]]:
        """The learner's metrics of one kind; of steps that were done twice, the last ones."""
        lines = self.run.metrics("learner").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        chosen = {row["step"]: row for row in rows if row.get("event") == event}
        return [chosen[step] for step in sorted(chosen)]

    def audit(self, *, steps: int, batch_groups: int) -> None:
        """Every group of the surviving history was trained once; no shard is damaged."""
        state = self.state()
        assert state.step == steps
        counts = state.samples
        assert counts.trained_groups == steps * batch_groups
        # A set: a group that was taken twice would be counted twice and held once.
        assert len(state.consumed) == counts.trained_groups
        lines = list(valid_lines(self.run.manifest))
        closed = [line for line in lines if isinstance(line, Closed)]
        ids = {line.group for line in closed if line.group < VALIDATION_BASE}
        assert set(state.consumed) <= ids
        assert not list(self.run.quarantine.iterdir())
        for shard in live_shards(lines).values():
            path = self.run.shard(shard.number)
            reader = OpenShard(path, number=shard.number, digest=shard.checksum)
            for row, (group, rollout, _) in enumerate(shard.rows):
                trajectory = reader.read(row)
                assert (trajectory.group_id, trajectory.rollout_index) == (group, rollout)
            reader.close()


def _quoted(path: Path) -> str:
    """A path inside Hydra's double quotes."""
    return str(path).replace("\\", "\\\\").replace('"', '\\"')


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
