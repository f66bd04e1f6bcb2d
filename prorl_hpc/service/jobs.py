"""Jobs of the service: admitted, queued by priority, run sample by sample, finished once.

    submit --> queue (priority, age) --> samples, at most `capacity` at once --> result on disk

Knows no HTTP. `Produce` is one attempt through INIT, RUN and EVAL; cancelling it frees the
attempt's container and its request at the engine.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hpc.errors import HpcError
from prorl_hpc.records import Trajectory
from prorl_hpc.service.places import Places
from prorl_hpc.service.schema import JobRequest, JobState, JobView, encode_result
from prorl_hpc.service.store import JobStore, StoredJob, StoreError

log = logging.getLogger("prorl_hpc.service")

SWEEP_SECONDS = 60.0


class Produce(Protocol):
    """One attempt at a job's instance, whatever becomes of it."""

    async def __call__(self, job: StoredJob, request: JobRequest, sample: int) -> Trajectory: ...


class Busy(HpcError, RuntimeError):
    """The queue is full; try again in `retry_seconds`."""

    def __init__(self, message: str, *, retry_seconds: int) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class KeyTaken(HpcError, ValueError):
    """The idempotency key was used for another request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What one service takes on."""

    capacity: int
    """Samples at work at once."""
    max_queued: int = 10_000
    """Jobs that wait."""
    max_unfetched: int = 100_000
    """Results that wait for their clients."""
    keep_fetched_seconds: float = 3600.0
    keep_unfetched_seconds: float = 7 * 24 * 3600.0
    """A result that nobody came for is swept."""
    max_retries: int = 3
    """Further attempts after an infrastructure failure, per sample."""


@dataclass(kw_only=True, slots=True)
class _Job:
    stored: StoredJob
    request: JobRequest
    state: JobState = JobState.queued
    finished: dict[int, Trajectory] = field(default_factory=dict)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None

    @property
    def num_usable(self) -> int:
        return sum(t.outcome.usable for t in self.finished.values())


class Jobs:
    """All jobs of one service. One event loop."""

    def __init__(
        self,
        store: JobStore,
        *,
        produce: Produce,
        bounds: Bounds,
        clock: Callable[[], float] = time.time,
        notify: Callable[[str, JobView], None] | None = None,
    ) -> None:
        """`notify` is given the callback URL and the view of each job that ends."""
        self._store = store
        self._produce = produce
        self._bounds = bounds
        self._clock = clock
        self._notify = notify
        self._unsaved: dict[str, Callable[[], None]] = {}
        self._live: dict[str, _Job] = {}
        self._places = Places(bounds.capacity)
        self._sweeper: asyncio.Task[None] | None = None
        self._num_unfetched = store.num_unfetched()
        self.samples: Counter[str] = Counter()
        """Outcomes of samples since the start."""
        self.ended: Counter[str] = Counter()
        """States that jobs ended in, since the start."""
        self.stage_seconds: Counter[str] = Counter()
        self.num_sampled_tokens = 0
        self.num_retries = 0

    @property
    def num_queued(self) -> int:
        return sum(job.state is JobState.queued for job in self._live.values())

    @property
    def num_running(self) -> int:
        """Jobs at work."""
        return sum(job.state is JobState.running for job in self._live.values())

    @property
    def num_samples_running(self) -> int:
        return self._places.num_taken

    @property
    def num_unfetched(self) -> int:
        """Results that wait for their clients, as of the last sweep."""
        return self._num_unfetched

    def start(self) -> None:
        """Takes up what a predecessor left unfinished, and begins."""
        for stored in self._store.unfinished():
            request = JobRequest.model_validate_json(stored.request)
            self._enqueue(_Job(stored=stored, request=request))
        self._sweeper = asyncio.create_task(self._sweep_forever(), name="sweep")

    async def close(self) -> None:
        """Stops all work; unfinished jobs stay queued on disk for a successor."""
        tasks = [job.task for job in self._live.values() if job.task]
        tasks += [self._sweeper] if self._sweeper else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for job in self._live.values():
            job.over.set()

    def submit(self, request: JobRequest, *, idempotency_key: str | None = None) -> StoredJob:
        """Records a job durably. The same key with the same request gives the same job.

        Raises KeyTaken, or Busy when there is no room.
        """
        text = request.model_dump_json()
        if idempotency_key is not None:
            before = self._store.by_key(idempotency_key)
            if before is not None:
                if JobRequest.model_validate_json(before.request) != request:
                    raise KeyTaken(
                        f"idempotency key {idempotency_key!r} belongs to job {before.id}, which "
                        "asked for something else; use a new key"
                    )
                return before
        if self.num_queued >= self._bounds.max_queued:
            raise Busy(
                f"{self.num_queued} jobs are waiting, the limit is {self._bounds.max_queued}",
                retry_seconds=5,
            )
        if self._num_unfetched >= self._bounds.max_unfetched:
            raise Busy(
                "too many results wait to be fetched; fetch or delete some", retry_seconds=60
            )
        stored = self._store.add(
            f"job-{secrets.token_hex(12)}", request=text, idempotency_key=idempotency_key
        )
        self._enqueue(_Job(stored=stored, request=request))
        return stored

    def view(self, job_id: str) -> JobView | None:
        """What is known of a job; None for one that isn't known."""
        live = self._live.get(job_id)
        if live is not None:
            return _live_view(live)
        stored = self._store.get(job_id)
        if stored is None:
            return None
        return _stored_view(stored)

    async def wait(self, job_id: str, *, seconds: float) -> None:
        """Returns once the job is over, or after so many seconds."""
        live = self._live.get(job_id)
        if live is not None and seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await live.over.wait()

    def result(self, job_id: str) -> bytes | None:
        """The result's JSON, marked as fetched; None while there is none."""
        result = self._store.result(job_id)
        if result is not None:
            self._store.mark_fetched(job_id)
        return result

    async def cancel(self, job_id: str) -> None:
        """Ends a job at whatever stage; returns when its containers and requests are gone.

        A finished job is forgotten, with its result.
        """
        live = self._live.get(job_id)
        if live is None:
            self._store.remove(job_id)
            return
        if live.task is not None:
            live.task.cancel()
            await asyncio.gather(live.task, return_exceptions=True)
        if not live.over.is_set():
            self._unsaved.pop(job_id, None)
            self._end(live, JobState.cancelled, "cancelled by the client")

    def _enqueue(self, job: _Job) -> None:
        self._live[job.stored.id] = job
        job.task = asyncio.create_task(self._run(job), name=job.stored.id)

    async def _run(self, job: _Job) -> None:
        deadline = job.request.deadline_seconds
        left = None
        if deadline is not None:
            left = max(0.0, job.stored.submitted + deadline - self._clock())
        detail = ""
        try:
            async with asyncio.timeout(left):
                await self._samples(job)
        except TimeoutError:
            detail = f"the deadline of {deadline:g} s passed"
        except HpcError as err:
            detail = str(err)
        if job.num_usable:
            self._end(job, JobState.done, detail)
            return
        reasons = [t.detail for t in job.finished.values() if t.detail]
        self._end(
            job, JobState.failed, detail or (reasons[-1] if reasons else "no sample came out")
        )

    async def _samples(self, job: _Job) -> None:
        """Runs samples until all are in, or enough of them; what is left then is cancelled."""
        wanted = min(job.request.min_usable or job.request.num_samples, job.request.num_samples)
        running: set[asyncio.Task[None]] = set()
        enough = asyncio.Event()
        broken: list[BaseException | None] = []

        async def attempt(sample: int) -> None:
            job.finished[sample] = await self._until_usable(job, sample)
            if job.num_usable >= wanted or len(job.finished) == job.request.num_samples:
                enough.set()

        def ended(task: "asyncio.Task[None]") -> None:
            self._places.release()
            running.discard(task)
            if not task.cancelled() and task.exception() is not None:
                broken.append(task.exception())
                enough.set()

        async def feed() -> None:
            for sample in range(job.request.num_samples):
                await self._places.acquire(-job.request.priority, job.stored.number)
                job.state = JobState.running  # on disk it stays queued: a successor runs it anew
                task = asyncio.create_task(attempt(sample), name=f"{job.stored.id}/{sample}")
                running.add(task)
                task.add_done_callback(ended)

        feeder = asyncio.create_task(feed(), name=job.stored.id)
        try:
            await enough.wait()
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)
            left = list(running)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if broken:
            raise HpcError(f"a sample failed by a defect: {broken[0]!r}")

    async def _until_usable(self, job: _Job, sample: int) -> Trajectory:
        """One sample; infrastructure failures are tried again."""
        for _ in range(self._bounds.max_retries):
            trajectory = await self._produce(job.stored, job.request, sample)
            self._count(trajectory)
            if trajectory.outcome.usable:
                return trajectory
            self.num_retries += 1
        trajectory = await self._produce(job.stored, job.request, sample)
        self._count(trajectory)
        return trajectory

    def _count(self, trajectory: Trajectory) -> None:
        self.samples[trajectory.outcome.value] += 1
        self.num_sampled_tokens += int(trajectory.loss_mask.sum())
        for stage, seconds in trajectory.timings.items():
            self.stage_seconds[stage] += seconds  # type: ignore[assignment]

    def _end(self, job: _Job, state: JobState, detail: str) -> None:
        samples = [job.finished[index] for index in sorted(job.finished)]
        data = encode_result(
            job.stored.id, state=state, task=job.request.task, trajectories=samples, detail=detail
        )

        def save() -> None:
            self._store.finish(
                job.stored.id,
                state=state,
                result=data,
                detail=detail,
                num_finished=len(samples),
                num_usable=job.num_usable,
            )
            self._ended(job, state, detail)

        try:
            save()
        except StoreError as err:
            # The job stays at work for its client until the disk takes its result.
            log.error("result of %s isn't on disk yet: %s", job.stored.id, err)
            self._unsaved[job.stored.id] = save

    def _ended(self, job: _Job, state: JobState, detail: str) -> None:
        job.state = state
        self._num_unfetched += 1  # counted anew at each sweep
        self.ended[state.value] += 1
        del self._live[job.stored.id]
        job.over.set()
        url = job.request.callback_url
        if url is not None and self._notify is not None:
            self._notify(url, _live_view(job, detail))

    async def _sweep_forever(self) -> None:
        while True:
            try:
                self.sweep()
            except StoreError as err:
                log.error("sweep: %s", err)
            await asyncio.sleep(SWEEP_SECONDS)

    def sweep(self) -> None:
        """Saves what the disk refused before, and removes what has been kept long enough."""
        for job_id, save in list(self._unsaved.items()):
            save()
            del self._unsaved[job_id]
        self._store.sweep(
            keep_fetched_seconds=self._bounds.keep_fetched_seconds,
            keep_unfetched_seconds=self._bounds.keep_unfetched_seconds,
        )
        self._num_unfetched = self._store.num_unfetched()


def _live_view(job: _Job, detail: str = "") -> JobView:
    return JobView(
        id=job.stored.id,
        state=job.state,
        num_samples=job.request.num_samples,
        num_finished=len(job.finished),
        num_usable=job.num_usable,
        detail=detail,
    )


def _stored_view(stored: StoredJob) -> JobView:
    return JobView(
        id=stored.id,
        state=stored.state,
        num_samples=JobRequest.model_validate_json(stored.request).num_samples,
        num_finished=stored.num_finished,
        num_usable=stored.num_usable,
        detail=stored.detail,
    )
