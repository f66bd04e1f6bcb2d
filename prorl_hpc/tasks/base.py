"""What a task is: where instances come from and how answers are scored. Knows no engine."""

from typing import Protocol

from hpc.errors import HpcError, UserError
from prorl_hpc.records import Instance, Kind, Score


class TaskError(UserError, ValueError):
    """A task that can't be set up as the recipe says (unknown name, empty data set, bad line)."""


class VerifierError(HpcError, RuntimeError):
    """The scorer failed through no fault of the agent: an infrastructure failure."""


class Task(Protocol):
    """A domain of problems with a verifiable reward."""

    name: str
    """Key of the task in the recipe."""

    def size(self, kind: Kind) -> int:
        """Number of instances of the split; at least 1. Train and validation never overlap."""

    def instance(self, index: int, *, kind: Kind) -> Instance:
        """Instance number `index` (0 <= index < size); the same for the same recipe, always."""

    def score(self, instance: Instance, response: str) -> Score:
        """Scores the final text. Blocking: runs in a process pool with a time-out.

        Raises VerifierError when the verifier itself fails.
        """
