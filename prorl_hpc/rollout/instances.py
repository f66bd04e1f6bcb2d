"""Instances of tasks, made once for all rollouts of a group. Knows no stage and no lease's life."""

import asyncio
from collections import OrderedDict

from prorl_hpc.records import Instance, Kind, Lease
from prorl_hpc.tasks.base import Task

REMEMBERED = 64
"""Instances kept: the rollouts of a group start close together."""

_Key = tuple[str, Kind, int]


class Instances:
    """Makes each instance in a thread, and lets all who ask meanwhile wait for the same one."""

    def __init__(self) -> None:
        self._made: OrderedDict[_Key, asyncio.Task[Instance]] = OrderedDict()

    async def get(self, task: Task, lease: Lease) -> Instance:
        """The lease's instance. Raises what the task raises; the next who asks tries again."""
        key = (lease.task, lease.kind, lease.instance_index)
        making = self._made.get(key)
        if making is None:
            making = asyncio.create_task(
                asyncio.to_thread(task.instance, lease.instance_index, kind=lease.kind)
            )
            self._made[key] = making
            making.add_done_callback(lambda done: self._forget_failed(key, done))
            if len(self._made) > REMEMBERED:
                self._made.popitem(last=False)
        # Shielded: one who is cancelled doesn't take it from the others.
        return making.result() if making.done() else await asyncio.shield(making)

    def _forget_failed(self, key: _Key, done: "asyncio.Task[Instance]") -> None:
        failed = done.cancelled() or done.exception() is not None
        if failed and self._made.get(key) is done:
            del self._made[key]
