"""The process that scores answers: `python -m prorl_hpc.rollout.verifier`. Imports no torch.

It talks over its standard input and output in frames: four bytes of length, then msgpack. First a
`Setup` comes in, answered by `Ready`; then requests, one at a time. It dies with its parent, and
its memory is bounded: an answer may be built to exhaust whoever checks it.
"""

import ctypes
import os
import resource
import signal
import struct
import sys
from collections import OrderedDict
from typing import BinaryIO

import msgspec

from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Instance, Kind, RecordError, Score, check_reward
from prorl_hpc.tasks.base import Task, TaskError, VerifierError
from prorl_hpc.tasks.registry import make_task

HEADER = struct.Struct("<I")
REMEMBERED = 64
"""Instances kept: the rollouts of a group ask for the same one."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What to score, and how much memory may be used."""

    tasks: dict[str, TaskConfig]
    seed: int
    memory_bytes: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to score."""

    task: str
    kind: Kind
    index: int
    response: str
    instance: Instance | None = None
    """The instance itself, where it isn't number `index` of the task's split."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The process takes requests."""


class Scored(msgspec.Struct, frozen=True, tag=True):
    score: Score


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The verifier failed through no fault of the answer."""

    error: str


Answer = Ready | Scored | Failed


def main() -> int:
    """Serves until the input ends."""
    _die_with_parent()
    source = sys.stdin.buffer
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not end up between frames
    setup = msgspec.msgpack.decode(_required(read_frame(source)), type=Setup)
    limit = (setup.memory_bytes, setup.memory_bytes)
    resource.setrlimit(resource.RLIMIT_AS, limit)
    scorer = Scorer(setup)
    write_frame(sink, msgspec.msgpack.encode(Ready()))
    while (frame := read_frame(source)) is not None:
        answer = scorer.answer(msgspec.msgpack.decode(frame, type=Request))
        write_frame(sink, msgspec.msgpack.encode(answer))
    return 0


class Scorer:
    """Makes tasks and instances as they are asked for."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._tasks: dict[str, Task] = {}
        self._instances: OrderedDict[tuple[str, Kind, int], Instance] = OrderedDict()

    def answer(self, request: Request) -> Answer:
        """The score, or why there is none."""
        try:
            instance = request.instance or self._instance(request)
            score = self._task(request.task).score(instance, request.response)
            check_reward(score.reward, outcome=score.outcome, name=instance.instance_id)
        except (VerifierError, TaskError, RecordError, MemoryError, OSError) as err:
            return Failed(f"{type(err).__name__}: {err}")
        return Scored(score)

    def _task(self, name: str) -> Task:
        if name not in self._tasks:
            config = self._setup.tasks.get(name)
            if config is None:
                raise TaskError(f"task {name!r} isn't in the recipe")
            self._tasks[name] = make_task(name, config, self._setup.seed)
        return self._tasks[name]

    def _instance(self, request: Request) -> Instance:
        key = (request.task, request.kind, request.index)
        if key not in self._instances:
            task = self._task(request.task)
            self._instances[key] = task.instance(request.index, kind=request.kind)
            if len(self._instances) > REMEMBERED:
                self._instances.popitem(last=False)
        return self._instances[key]


def read_frame(source: BinaryIO) -> bytes | None:
    """The next frame; None at the end of input."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    return source.read(length)


def write_frame(sink: BinaryIO, data: bytes) -> None:
    sink.write(HEADER.pack(len(data)) + data)
    sink.flush()


def _required(frame: bytes | None) -> bytes:
    if frame is None:
        raise SystemExit(0)
    return frame


def _die_with_parent() -> None:
    """A verifier that hangs in an answer wouldn't notice that its input ended."""
    set_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() == 1:
        raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
