"""A pool of verifier processes that are replaced when they hang or die. Knows no task's rules."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping

import msgspec

from prorl_hpc.recipe import TaskConfig
from prorl_hpc.records import Score
from prorl_hpc.rollout.verifier import HEADER, Answer, Failed, Ready, Request, Scored, Setup
from prorl_hpc.tasks.base import VerifierError

START_SECONDS = 120.0
MEMORY_BYTES = 6 << 30
"""Address space of one verifier."""

SCORES_PER_PROCESS = 5000
"""After so many a verifier is replaced: caches of symbolic mathematics only grow."""

MODULE = "prorl_hpc.rollout.verifier"


class VerifierTimeout(VerifierError, TimeoutError):
    """The verifier didn't come to an end with this answer."""


class _Verifier:
    """One process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.num_scores = 0

    @classmethod
    async def start(cls, setup: Setup) -> "_Verifier":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            MODULE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        verifier = cls(process)
        try:
            async with asyncio.timeout(START_SECONDS):
                ready = await verifier.ask(msgspec.msgpack.encode(setup))
        except TimeoutError as err:
            await verifier.kill()
            raise VerifierError(f"a verifier didn't start within {START_SECONDS:.0f} s") from err
        except BaseException:
            await verifier.kill()
            raise
        if not isinstance(ready, Ready):
            await verifier.kill()
            raise VerifierError(f"a verifier answered {ready} at start")
        return verifier

    async def ask(self, data: bytes) -> Answer:
        """Raises VerifierError when the process died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(HEADER.pack(len(data)) + data)
            await self._process.stdin.drain()
            (length,) = HEADER.unpack(await self._process.stdout.readexactly(HEADER.size))
            frame = await self._process.stdout.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as err:
            raise VerifierError("a verifier died; the log has its last words") from err
        return msgspec.msgpack.decode(frame, type=Answer)

    async def kill(self) -> None:
        """Ends the process and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


class VerifierPool:
    """Scores answers in processes of their own; at most `num_workers`, started when needed."""

    def __init__(
        self,
        tasks: Mapping[str, TaskConfig],
        *,
        seed: int,
        num_workers: int,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._setup = Setup(tasks=dict(tasks), seed=seed, memory_bytes=memory_bytes)
        self._free = asyncio.Semaphore(num_workers)
        self._idle: list[_Verifier] = []
        self._all: set[_Verifier] = set()
        self.num_replaced = 0

    async def score(self, request: Request, *, timeout_seconds: float) -> Score:
        """Raises VerifierTimeout, or VerifierError when the verifier failed.

        A verifier that dies is tried once more with a fresh one.
        """
        async with self._free:
            try:
                answer = await self._attempt(request, timeout_seconds)
            except VerifierTimeout:
                raise
            except VerifierError:
                answer = await self._attempt(request, timeout_seconds)
        if isinstance(answer, Failed):
            raise VerifierError(answer.error)
        if not isinstance(answer, Scored):
            raise VerifierError(f"a verifier answered {answer}")
        return answer.score

    async def close(self) -> None:
        """Ends all verifiers."""
        await asyncio.gather(*(verifier.kill() for verifier in self._all))
        self._all.clear()
        self._idle.clear()

    async def _attempt(self, request: Request, timeout_seconds: float) -> Answer:
        verifier = self._idle.pop() if self._idle else await self._start()
        try:
            async with asyncio.timeout(timeout_seconds):
                answer = await verifier.ask(msgspec.msgpack.encode(request))
        except BaseException as err:
            # Also when the rollout was cancelled: the answer to it would come back to another.
            self.num_replaced += 1
            await self._drop(verifier)
            if isinstance(err, TimeoutError) and not isinstance(err, VerifierError):
                raise VerifierTimeout(f"scoring took more than {timeout_seconds:g} s") from err
            raise
        verifier.num_scores += 1
        if verifier.num_scores < SCORES_PER_PROCESS:
            self._idle.append(verifier)
        else:
            await self._drop(verifier)
        return answer

    async def _start(self) -> _Verifier:
        verifier = await _Verifier.start(self._setup)
        self._all.add(verifier)
        return verifier

    async def _drop(self, verifier: _Verifier) -> None:
        self._all.discard(verifier)
        await verifier.kill()
