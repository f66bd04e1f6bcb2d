"""Who is missing? Ends a run that can't go on, and says who was missing. Pure."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Watch:
    """The no-progress watchdog of the buffer."""

    peer_seconds: float
    """How long the learner or all rollout nodes may be silent."""
    stall_seconds: float
    """How long leases may be held without one trajectory coming in."""
    started: float
    learner_heard: float | None = None
    rollout_heard: float | None = None
    progressed: float | None = None
    """When a trajectory was last stored, or nothing was leased."""

    def culprit(self, now: float) -> str:
        """One line on who keeps the run from going on; empty while all is in bounds."""
        for role, heard in (
            ("learner", self.learner_heard),
            ("rollout node", self.rollout_heard),
        ):
            silent = now - (self.started if heard is None else heard)
            if silent > self.peer_seconds:
                ever = "ever came" if heard is None else "is left"
                return (
                    f"no {role} {ever}: silent for {silent:.0f} s, buffer.peer_seconds="
                    f"{self.peer_seconds:.0f}; look at the {role}'s logs and at the queue"
                )
        stalled = now - (self.started if self.progressed is None else self.progressed)
        if stalled > self.stall_seconds:
            return (
                f"rollout nodes hold leases but sent no trajectory for {stalled:.0f} s; "
                "look at their logs: an engine or environment hangs"
            )
        return ""
