"""Every path of a run, those of the learning layer included. Joins names and nothing else."""

from dataclasses import dataclass
from pathlib import Path

from hpc.rundir import RunDirectory


@dataclass(frozen=True, slots=True)
class Run(RunDirectory):
    """One run directory; nobody else joins its paths."""

    @property
    def shards(self) -> Path:
        return self.root / "buffer" / "shards"

    def shard(self, number: int) -> Path:
        return self.shards / f"{number:08d}.h5"

    @property
    def manifest(self) -> Path:
        return self.root / "buffer" / "manifest.jsonl"

    @property
    def quarantine(self) -> Path:
        return self.root / "buffer" / "quarantine"

    @property
    def policies(self) -> Path:
        return self.root / "policy"

    def policy(self, version: int) -> Path:
        return self.policies / f"v{version:08d}"

    @property
    def latest_policy(self) -> Path:
        """A small JSON file naming the newest published version."""
        return self.policies / "latest"

    @property
    def announcements(self) -> Path:
        """Where inference jobs say that they serve."""
        return self.endpoints / "inference"

    def announcement(self, index: int) -> Path:
        return self.announcements / f"{index}.json"

    @property
    def inference_token(self) -> Path:
        """Bearer token of the run's inference jobs, 0600."""
        return self.secrets / "inference-token"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    @property
    def exports(self) -> Path:
        """Model directories that no clean-up touches."""
        return self.root / "export"

    def export(self, step: int) -> Path:
        return self.exports / f"step-{step:08d}"

    def metrics(self, role: str, *, index: int = 0) -> Path:
        return self.root / "metrics" / (f"{role}.jsonl" if index == 0 else f"{role}-{index}.jsonl")

    @property
    def tensorboard(self) -> Path:
        return self.root / "metrics" / "tensorboard"

    @property
    def model_start(self) -> Path:
        """The policy that training starts from (after warm-up), in Hugging Face form."""
        return self.root / "start"

    @property
    def warmup(self) -> Path:
        """How far the warm-up is, while it lasts."""
        return self.root / "warmup.safetensors"

    @property
    def validation(self) -> Path:
        """One JSON line per validated policy version."""
        return self.root / "metrics" / "validation.jsonl"

    @property
    def requests(self) -> Path:
        """Requests of the user to a running learner, e.g. `reset-reference`."""
        return self.root / "requests"

    @property
    def scale(self) -> Path:
        """How many rollout nodes the user wants (`prorl-hpc scale`), as JSON."""
        return self.root / "scale.json"

    @property
    def evaluations(self) -> Path:
        """Results of `prorl-hpc eval` over several versions, with their jobs' logs."""
        return self.root / "evaluations"

    @property
    def service_job(self) -> Path:
        """What a service that runs as a job serves, and where."""
        return self.root / "service-job.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"
