"""The groups of one validation: ids and instances as a function of what was asked. Pure."""

from prorl_hpc.buffer.groups import OpenGroup
from prorl_hpc.buffer.manifest import Validation
from prorl_hpc.buffer.messages import VALIDATION_BASE
from prorl_hpc.records import Kind

IDS_PER_VERSION = 1 << 20


def first_group(version: int) -> int:
    """Id of the first group of a version's validation."""
    return VALIDATION_BASE + version * IDS_PER_VERSION


def place(group_id: int) -> tuple[int, int] | None:
    """(version, number within its validation) of a group; None for one of training."""
    if group_id < VALIDATION_BASE:
        return None
    return divmod(group_id - VALIDATION_BASE, IDS_PER_VERSION)


class ValidationSet:
    """The first `counts[task]` validation instances of each task, in the order of task names."""

    def __init__(self, line: Validation) -> None:
        self._line = line
        self._first = first_group(line.version)
        self._instances = [
            (task, index) for task, count in sorted(line.counts.items()) for index in range(count)
        ]
        if len(self._instances) > IDS_PER_VERSION:
            raise ValueError(
                f"validation of {len(self._instances)} instances; at most {IDS_PER_VERSION}"
            )

    @property
    def group_ids(self) -> range:
        return range(self._first, self._first + len(self._instances))

    def open_group(self, group_id: int) -> OpenGroup:
        """The group, with nothing done yet."""
        task, index = self._instances[group_id - self._first]
        return OpenGroup(
            group_id=group_id,
            kind=Kind.validation,
            task=task,
            instance_index=index,
            num_rollouts=self._line.num_rollouts,
            min_usable=1,
            policy_version=self._line.version,
            context_tokens=None,
        )
