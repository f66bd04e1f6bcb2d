"""A dispatcher whose manifest is a list: everything is durable at once."""

from prorl_hpc.buffer.dispatcher import Admission, Dispatcher
from prorl_hpc.buffer.manifest import Line, Shard
from prorl_hpc.buffer.messages import GroupIds
from prorl_hpc.records import Lease
from tests.prorl_hpc.buffer.buffer_helpers import make_config, produce


class Disk:
    """Makes everything durable at once, in a manifest of its own."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.lines: list[Line] = []

    def push(self, lease: Lease, *, now: float = 0.0) -> list[Admission]:
        answers = []
        for t in produce(lease):
            answers.append(self.dispatcher.admit(t, now=now))
            if answers[-1] is Admission.accept:
                self.seal(t.group_id, t.rollout_index)
        return answers

    def seal(self, group_id: int, rollout: int) -> None:
        number = len(self.lines) + 1
        row = (group_id, rollout, True)
        self.lines.append(Shard(number=number, num_bytes=1, rows=(row,)))
        self.dispatcher.stored(group_id, rollout, location=(number, 0), usable=True)
        self.flush()

    def flush(self) -> None:
        for line in self.dispatcher.drain_lines():
            self.lines.append(line)
            self.dispatcher.recorded(line)
        if self.dispatcher._lines:
            self.flush()


def make(**changes: object) -> tuple[Dispatcher, Disk]:
    dispatcher = Dispatcher(make_config(**changes))
    return dispatcher, Disk(dispatcher)


def announce(d: Dispatcher, *, version: int = 0, filtered: int = 0, done: int = 0) -> None:
    d.announce(
        version=version,
        step=version,
        filtered=filtered,
        consumed=GroupIds(((0, done),) if done else ()),
        held=GroupIds(),
    )
