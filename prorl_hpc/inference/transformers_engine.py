"""The engine for CPUs and small models: transformers in this process, batched in one thread.

    event loop                         decode thread (owns the model)
    generate() --- Request -------->   admit waiting -> step -> drop finished -> (load) -> ...
        ^--- Completion -----------    between two steps only
    stream()   <-- Chunk after each step

A new version is read from disk beside the running batch and swapped in between two steps. Requests
in flight go on: the cache is computed again with the new weights, so every token's log-probability
is that of the version stamped on it. In deterministic mode requests run one by one: the same seed
gives bit-identical tokens, whatever else is asked for at the same time.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from prorl_hpc.inference.decode import Row, RunningBatch
from prorl_hpc.inference.engine import Chunk, Completion, EngineError, Sampling
from prorl_hpc.inference.http import RequestRefused
from prorl_hpc.inference.weights import copy_weights, first_line, read_weights

CLOSE_SECONDS = 60.0
"""Longest wait for the decode thread to end its current step."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Request:
    row: Row
    future: asyncio.Future[Completion]
    loop: asyncio.AbstractEventLoop
    chunks: asyncio.Queue[Chunk | None] | None = None
    """Where a stream's tokens go; None is the end of what there is, the future says how it went."""
    num_sent: int = 0
    cancelled: bool = False


@dataclass(kw_only=True, slots=True)
class _Swap:
    version: int
    weights: dict[str, Any]
    done: threading.Event
    error: Exception | None = None


class TransformersEngine:
    """One model in this process. `start` before anything else; one event loop."""

    def __init__(
        self,
        *,
        path: Path,
        version: int,
        max_batch: int = 32,
        dtype: str = "float32",
        attention: str = "auto",
        deterministic: bool = False,
    ) -> None:
        self._path = path
        self._start_version = version
        self._max_batch = 1 if deterministic else max_batch
        self._dtype = dtype
        self._attention = attention
        self._wake = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._swap: _Swap | None = None
        self._closed = False
        self._batch: RunningBatch | None = None
        self._thread: threading.Thread | None = None
        self._loading = asyncio.Lock()

    @property
    def version(self) -> int:
        return self._batch.version if self._batch else self._start_version

    async def start(self) -> None:
        """Loads the model; raises EngineError."""
        model = await asyncio.to_thread(self._load_model)
        self._batch = RunningBatch(model, version=self._start_version)
        self._thread = threading.Thread(target=self._decode_forever, name="decode", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        *,
        sampling: Sampling,
        affinity: str = "",  # noqa: ARG002
    ) -> Completion:
        """Continues `prompt_ids`; `affinity` has no effect here (prefixes aren't kept)."""
        request = self._submit(prompt_ids, sampling)
        try:
            return await request.future
        finally:
            request.cancelled = True

    async def stream(
        self,
        prompt_ids: tuple[int, ...],
        *,
        sampling: Sampling,
        affinity: str = "",  # noqa: ARG002
    ) -> AsyncGenerator[Chunk, None]:
        """A chunk after each step; closing it drops the row before the next one."""
        chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        request = self._submit(prompt_ids, sampling, chunks=chunks)
        request.future.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            await request.future
        finally:
            request.cancelled = True
            request.future.cancel()

    def _submit(
        self,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        *,
        chunks: asyncio.Queue[Chunk | None] | None = None,
    ) -> _Request:
        self._check(prompt_ids, sampling)
        row = Row(prompt_ids=prompt_ids, sampling=sampling, random=Random(sampling.seed))
        loop = asyncio.get_running_loop()
        request = _Request(row=row, future=loop.create_future(), loop=loop, chunks=chunks)
        with self._wake:
            if self._closed:
                raise EngineError("the engine is closed")
            self._waiting.append(request)
            self._wake.notify()
        return request

    async def load(self, version: int, *, path: Path) -> None:
        """Moves to `version`; raises EngineError, with the old weights kept, if it can't."""
        async with self._loading:
            weights = await asyncio.to_thread(read_weights, path, version)
            swap = _Swap(version=version, weights=weights, done=threading.Event())
            with self._wake:
                if self._closed:
                    raise EngineError("the engine is closed")
                if self._swap is not None:  # of a caller who was cancelled: its thread still waits
                    _give_up(self._swap, EngineError("another version came"))
                self._swap = swap
                self._wake.notify()
            await asyncio.to_thread(swap.done.wait)
            if swap.error is not None:
                raise EngineError(
                    f"version {version} can't be loaded: {swap.error}"
                ) from swap.error

    async def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)
        self._batch = None

    def _load_model(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        quiet: Any = transformers_logging.disable_progress_bar
        quiet()
        attention = "sdpa" if self._attention == "auto" else self._attention
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(self._path),
                dtype=getattr(torch, self._dtype),
                attn_implementation=attention,
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as err:
            raise EngineError(f"model {self._path} can't be loaded: {first_line(err)}") from err
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return model.to(device).eval()

    def _check(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> None:
        if self._batch is None:
            raise EngineError("the engine isn't started")
        if not prompt_ids or sampling.max_new_tokens < 1:
            raise RequestRefused(
                f"a request of {len(prompt_ids)} prompt tokens and max_new_tokens="
                f"{sampling.max_new_tokens} asks for nothing; give at least 1 of each"
            )
        size = self._batch.model.config.get_text_config().vocab_size
        if not 0 <= min(prompt_ids) <= max(prompt_ids) < size:
            raise RequestRefused(
                f"token ids {min(prompt_ids)}..{max(prompt_ids)} leave the model's vocabulary of "
                f"{size}; tokenizer and model don't belong together"
            )

    def _decode_forever(self) -> None:
        assert self._batch is not None
        running: dict[Row, _Request] = {}
        while True:
            with self._wake:
                while not (self._closed or self._waiting or self._swap or running):
                    self._wake.wait()
                swap, self._swap = self._swap, None
                admitted: list[_Request] = []
                while self._waiting and len(running) + len(admitted) < self._max_batch:
                    admitted.append(self._waiting.popleft())
                if self._closed:
                    admitted += self._waiting
                    self._waiting.clear()
                    break
            self._turn(running, swap, [r for r in admitted if not r.cancelled])
        if swap is not None:
            _give_up(swap, EngineError("the engine is closed"))
        for request in [*running.values(), *admitted]:
            _fail(request, EngineError("the engine is closed"))

    def _turn(
        self, running: dict[Row, _Request], swap: _Swap | None, admitted: list[_Request]
    ) -> None:
        """One step of the batch; a failure is the requests' failure, not the thread's."""
        batch = self._batch
        assert batch is not None
        try:
            batch.leave([row for row, request in running.items() if request.cancelled])
            for row in [row for row, request in running.items() if request.cancelled]:
                del running[row]
            if swap is not None:
                _apply(batch, swap)
            if batch.rows:
                batch.step()
            if admitted:
                running.update({request.row: request for request in admitted})
                batch.join([request.row for request in admitted])
            _send([request for request in running.values() if request.chunks is not None])
            finished = [row for row in batch.rows if row.finish_reason is not None]
            batch.leave(finished)
            _finish([running.pop(row) for row in finished])
        except Exception as err:  # whatever torch raises (memory, device, shapes)
            batch.clear()
            if swap is not None and not swap.done.is_set():
                _give_up(swap, err)  # else whoever loads would wait for ever
            for request in running.values():
                _fail(request, EngineError(f"decoding failed: {first_line(err)}"))
            running.clear()


def _apply(batch: RunningBatch, swap: _Swap) -> None:
    try:
        copy_weights(batch.model, swap.weights)
    except (ValueError, RuntimeError) as err:
        _give_up(swap, err)
        return
    batch.version = swap.version
    swap.done.set()
    batch.rebuild()


def _give_up(swap: _Swap, error: Exception) -> None:
    swap.error = error
    swap.done.set()


def _finish(requests: list[_Request]) -> None:
    """Resolves the requests of one step together: each wakeup of a loop is a system call."""
    if not requests:
        return
    done = [(request.future, _completion(request.row)) for request in requests]

    def resolve() -> None:
        for future, completion in done:
            if not future.done():
                future.set_result(completion)

    _call(requests[0].loop, resolve)


def _send(requests: list[_Request]) -> None:
    """Hands each stream what its row has made since the last time."""
    if not requests:
        return
    made = [(request.chunks, _chunk(request)) for request in requests]

    def put() -> None:
        for chunks, chunk in made:
            if chunks is not None:
                chunks.put_nowait(chunk)

    _call(requests[0].loop, put)


def _chunk(request: _Request) -> Chunk:
    row, start = request.row, request.num_sent
    request.num_sent = len(row.token_ids)
    return Chunk(
        token_ids=tuple(row.token_ids[start:]),
        logprobs=tuple(row.logprobs[start:]),
        versions=tuple(row.versions[start:]),
        finish_reason=row.finish_reason,
    )


def _completion(row: Row) -> Completion:
    return Completion(
        token_ids=tuple(row.token_ids),
        logprobs=tuple(row.logprobs),
        versions=tuple(row.versions),
        finish_reason=row.finish_reason or "abort",
    )


def _fail(request: _Request, error: EngineError) -> None:
    def resolve() -> None:
        if not request.future.done():
            request.future.set_exception(error)

    _call(request.loop, resolve)


def _call(loop: asyncio.AbstractEventLoop, function: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is gone: nobody waits any more
        loop.call_soon_threadsafe(function)
