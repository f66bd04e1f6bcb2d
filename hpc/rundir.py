"""Every path of a run that the cluster layer knows. Joins names; reads and writes nothing else."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """One run directory. `prorl_hpc.run.Run` adds the paths of the learning layer."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def site(self) -> Path:
        return self.root / "site.json"

    @property
    def provenance(self) -> Path:
        return self.root / "provenance.json"

    @property
    def readme(self) -> Path:
        return self.root / "README.txt"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.jsonl"

    @property
    def scripts(self) -> Path:
        return self.root / "scripts"

    def script(self, job: str) -> Path:
        return self.scripts / f"{job}.sbatch"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    @property
    def endpoints(self) -> Path:
        return self.root / "endpoints"

    def endpoint(self, role: str) -> Path:
        return self.endpoints / f"{role}.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def job_logs(self, role: str, *, index: int) -> Path:
        return self.logs / role / str(index)

    def attempt_logs(self, role: str, *, index: int, attempt: int) -> Path:
        return self.job_logs(role, index=index) / f"attempt-{attempt}"

    @property
    def stop_request(self) -> Path:
        """Exists once the user cancelled the run: no attempt starts any more."""
        return self.root / "stop"

    def progress(self, role: str, *, index: int) -> Path:
        """A number that grows with the role's progress; chains stop when it doesn't."""
        return self.root / "progress" / f"{role}-{index}"

    def desired(self, job: str) -> Path:
        """How many tasks of an array the user wants, once `scale` changed the plan's number."""
        return self.root / "desired" / job

    @property
    def supervisor(self) -> Path:
        """Local backend: locked by the one supervisor of the run while it lives."""
        return self.root / "supervisor.lock"

    def attempt_start(self, role: str, *, index: int, attempt: int) -> Path:
        return self.attempt_logs(role, index=index, attempt=attempt) / "start.json"

    def attempt_exit(self, role: str, *, index: int, attempt: int) -> Path:
        return self.attempt_logs(role, index=index, attempt=attempt) / "exit.json"

    def resumed(self, role: str, *, index: int) -> Path:
        """Last attempt before the user resumed: a chain without progress counts from there."""
        return self.job_logs(role, index=index) / "resumed"
