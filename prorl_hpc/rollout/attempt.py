"""What is known of one attempt while it is in the pipeline, and the trajectory it ends as.

Whatever happens, a trajectory comes out: a failure that isn't the agent's fault becomes the outcome
`infrastructure_failure`, with the reason, and never a reward. Knows no stage and no engine.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hpc.isolation import Isolation
from prorl_hpc.agents.episode import Conversation, Transcript
from prorl_hpc.records import Instance, Lease, Outcome, Score, Trajectory
from prorl_hpc.tasks.session_task import Session


@dataclass(kw_only=True, slots=True)
class Attempt:
    """What is known so far of one attempt."""

    lease: Lease
    rollout_index: int
    worker: str
    worker_attempt: int
    """Of the worker's job; not this attempt's number."""
    clock: Callable[[], float]
    started: float
    stage: str = "init"
    timings: dict[str, float] = field(default_factory=dict)
    isolation: dict[str, str] = field(default_factory=dict)
    instance: Instance | None = None
    conversation: Conversation | None = None
    outcome: Outcome | None = None
    """Set where the way the episode ended decides it; else the score does."""
    finish_reason: str = ""
    detail: str = ""
    result: bytes | None = None
    session: Session | None = None

    def isolated(self, isolation: Isolation) -> None:
        """Records how the agent was kept in."""
        self.isolation = {
            key: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            for key, value in isolation.to_json().items()
        }

    def finished(self, score: Score) -> Trajectory:
        """The trajectory of an attempt that has a score."""
        conversation = self.conversation
        assert conversation is not None
        outcome = self.outcome or score.outcome
        if outcome is Outcome.infrastructure_failure:
            return self.failed("the verifier reports a failure of its own")
        if conversation.truncated and self.outcome is None:
            outcome = Outcome.truncated
        tokens, loss_mask, logprobs, versions = conversation.transcript.arrays()
        return Trajectory(
            **self._frame(),
            tokens=tokens,
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=versions,
            reward=float(score.reward),
            components=score.components | conversation.counts,
            outcome=outcome,
            finish_reason=self.finish_reason or conversation.finish_reason,
            detail=self.detail or conversation.note,
        ).check()

    def failed(self, detail: str) -> Trajectory:
        """The trajectory of one that came to nothing through no fault of the agent's."""
        tokens, loss_mask, logprobs, versions = Transcript().arrays()
        line = " ".join(detail.split())[:500]
        return Trajectory(
            **self._frame(),
            tokens=tokens,
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=versions,
            reward=None,
            outcome=Outcome.infrastructure_failure,
            finish_reason="error",
            detail=f"{self.stage}: {line}",
        ).check()

    def _frame(self) -> dict[str, Any]:
        """The fields that don't depend on how it went."""
        whole = self.clock() - self.started
        waited = max(whole - sum(self.timings.values()), 0.0)
        lease, instance = self.lease, self.instance
        return {
            "group_id": lease.group_id,
            "rollout_index": self.rollout_index,
            "kind": lease.kind,
            "task": lease.task,
            "instance_id": instance.instance_id if instance else f"#{lease.instance_index}",
            "timings": {name: round(value, 6) for name, value in self.timings.items()}
            | {"queue": round(waited, 6)},
            "isolation": self.isolation,
            "worker": self.worker,
            "attempt": self.worker_attempt,
        }
