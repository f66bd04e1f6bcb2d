"""Whether this node is fit for work, from how its rollouts end. Pure; knows no engine.

A node on which everything fails would burn the retries of every group. After so many failures in a
row it draws no more work and tries an attempt of its own; after some of those it goes home.
"""

from collections import Counter
from enum import StrEnum

from prorl_hpc.records import Outcome


class State(StrEnum):
    """What the node may do."""

    well = "well"
    suspect = "suspect"
    """Draws no work; probes."""
    sick = "sick"
    """Ends."""


class Health:
    """Counts outcomes."""

    def __init__(self, *, max_failures: int = 16, max_probes: int = 3) -> None:
        self._max_failures = max_failures
        self._max_probes = max_probes
        self._failures = 0
        self._probes = 0
        self.state = State.well
        self.outcomes: Counter[str] = Counter()
        self.last_failure = ""
        self.last_failed_task = ""

    def record(self, outcome: Outcome, *, task: str = "", detail: str = "") -> None:
        """A rollout ended."""
        self.outcomes[outcome.value] += 1
        if outcome is not Outcome.infrastructure_failure:
            self._failures = self._probes = 0
            self.state = State.well
            return
        self._failures += 1
        self.last_failure = detail
        self.last_failed_task = task
        if self._failures >= self._max_failures and self.state is State.well:
            self.state = State.suspect

    def probed(self, outcome: Outcome, *, detail: str = "") -> None:
        """A probe ended."""
        if outcome is not Outcome.infrastructure_failure:
            self._failures = self._probes = 0
            self.state = State.well
            return
        self._probes += 1
        self.last_failure = detail
        if self._probes >= self._max_probes:
            self.state = State.sick

    @property
    def note(self) -> str:
        """One line for people; empty while all is well."""
        return "" if self.state is State.well else f"node is {self.state}: {self.last_failure}"

    @property
    def probe_delay_seconds(self) -> float:
        """Pause before the next probe: 5 s, doubled each time."""
        return float(5 * 2**self._probes)
