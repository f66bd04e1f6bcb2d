"""What goes over the wire of the rollout service, version 1. Knows no server and no pipeline."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from prorl_hpc.records import Trajectory

MAX_SAMPLES = 1024
MAX_DEADLINE_SECONDS = 7 * 24 * 3600.0
LARGEST_INDEX = 2**53

Name = Annotated[str, Field(min_length=1, max_length=200)]


class JobState(StrEnum):
    """Where a job is."""

    queued = "queued"
    running = "running"
    done = "done"
    failed = "failed"
    """No usable sample came out; `detail` says why."""
    cancelled = "cancelled"

    @property
    def over(self) -> bool:
        return self in (JobState.done, JobState.failed, JobState.cancelled)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class PostedMessage(_Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class PostedInstance(_Strict):
    """A problem of the client's own, in the form of one of the served tasks."""

    instance_id: Name
    messages: list[PostedMessage] = Field(min_length=1, max_length=1000)
    answer: Any = None
    """What the task's verifier needs."""
    metadata: dict[str, Any] = Field(default_factory=dict)


class JobRequest(_Strict):
    """`num_samples` attempts at one instance: number `index` of a task's split, or a posted one."""

    task: Name
    index: int | None = Field(default=None, ge=0, le=LARGEST_INDEX)
    instance: PostedInstance | None = None
    kind: Literal["train", "validation"] = "train"
    num_samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    min_usable: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    """Early stop: once so many usable samples are in, the others are cancelled."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Higher is served first."""
    deadline_seconds: float | None = Field(default=None, gt=0, le=MAX_DEADLINE_SECONDS)
    """From now; what is in by then is the result."""
    temperature: float | None = Field(default=None, gt=0, le=100)
    max_new_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    seed: int = Field(default=0, ge=0, le=LARGEST_INDEX)
    callback_url: str | None = Field(default=None, min_length=1, max_length=2000)
    """POSTed the job's view once it is over, where the operator allows that host."""


class JobView(BaseModel):
    """A job as the client sees it."""

    id: str
    state: JobState
    num_samples: int
    num_finished: int
    num_usable: int
    detail: str = ""


class Sample(BaseModel):
    """One trajectory, as token ids. The four lists have the same length."""

    sample: int
    tokens: list[int]
    loss_mask: list[int]
    """1 on tokens that the policy sampled."""
    logprobs: list[float]
    """The sampler's log-probability of sampled tokens; 0 elsewhere."""
    versions: list[int]
    """Policy version that sampled the token; -1 elsewhere."""
    reward: float | None
    """None exactly when the outcome is `infrastructure_failure`."""
    components: dict[str, float]
    outcome: str
    finish_reason: str
    timings: dict[str, float]
    isolation: dict[str, str]
    detail: str


class JobResult(BaseModel):
    id: str
    state: JobState
    task: str
    instance_id: str
    samples: list[Sample]
    detail: str = ""


class TaskView(BaseModel):
    name: str
    train_size: int
    validation_size: int


class PolicyRequest(_Strict):
    """A published policy directory (with its manifest) that the server can read."""

    version: int = Field(ge=0, le=2**31 - 1)
    path: str = Field(min_length=1, max_length=4096)


class PolicyView(BaseModel):
    version: int


class Problem(BaseModel):
    """Every error's body."""

    detail: str


def encode_result(
    job_id: str,
    *,
    state: JobState,
    task: str,
    trajectories: Sequence[Trajectory],
    detail: str,
) -> bytes:
    """A `JobResult` as JSON, straight from the arrays: validating each token costs more than all
    else that the service does for a rollout."""
    return msgspec.json.encode(
        {
            "id": job_id,
            "state": state.value,
            "task": task,
            "instance_id": trajectories[0].instance_id if trajectories else "",
            "samples": [_sample(trajectory) for trajectory in trajectories],
            "detail": detail,
        }
    )


def _sample(trajectory: Trajectory) -> dict[str, Any]:
    """The fields of a `Sample`."""
    return {
        "sample": trajectory.rollout_index,
        "tokens": trajectory.tokens.tolist(),
        "loss_mask": trajectory.loss_mask.tolist(),
        "logprobs": trajectory.logprobs.tolist(),
        "versions": trajectory.versions.tolist(),
        "reward": trajectory.reward,
        "components": trajectory.components,
        "outcome": trajectory.outcome.value,
        "finish_reason": trajectory.finish_reason,
        "timings": trajectory.timings,
        "isolation": trajectory.isolation,
        "detail": trajectory.detail,
    }
