"""The sandboxes of a process that runs attempts: made ready, and refused in time. Runs nothing."""

import contextlib
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from hpc.errors import ImageError
from prorl_hpc.records import Kind
from prorl_hpc.tasks.base import Task
from prorl_hpc.tasks.environment_task import EnvironmentTask, MakeEnvironment


def open_environments(
    stack: AsyncExitStack, tasks: Mapping[str, Task], scratch: Path
) -> MakeEnvironment | None:
    """The factory of this process; None where no task needs one. Blocking.

    Raises IsolationError, with the admin's fix, before any work is drawn.
    """
    sandboxed = [task for task in tasks.values() if isinstance(task, EnvironmentTask)]
    if not sandboxed:
        return None
    from prorl_hpc.environment.factory import EnvironmentFactory

    factory = EnvironmentFactory(scratch)
    stack.callback(factory.close)
    for task in sandboxed:
        # an image that is missing may be one instance's alone: that attempt will tell
        with contextlib.suppress(ImageError):
            factory.check(task.environment_spec(task.instance(0, kind=Kind.validation)))
    return factory.create
