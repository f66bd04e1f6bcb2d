"""Work beside training: one job at a time in a thread. Knows no tensors and no files."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """A function that runs in a thread from now on."""

    def __init__(self, body: Callable[[], T], *, name: str) -> None:
        self._body = body
        self._value: T | None = None
        self._problem: BaseException | None = None
        # Not a daemon: what was begun is written to its end, whatever ends the main thread.
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def result(self) -> T:
        """Waits for the end; the function's value, or its error raised here."""
        self._thread.join()
        if self._problem is not None:
            raise self._problem
        return self._value  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._value = self._body()
        except BaseException as err:  # raised again by whoever waits
            self._problem = err


class Line:
    """At most one job under way; the next one waits for it and raises what went wrong."""

    def __init__(self, *, name: str, beside: bool) -> None:
        self._name = name
        self._beside = beside
        """False: every job runs at once, in the caller's thread."""
        self._job: Job[None] | None = None

    def put(self, body: Callable[[], None]) -> None:
        """Starts `body`; raises the error of the job before."""
        self.wait()
        if self._beside:
            self._job = Job(body, name=self._name)
        else:
            body()

    def wait(self) -> None:
        """Returns when nothing is under way; raises the error of the last job, once."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def check(self) -> None:
        """Raises the error of the last job if it has ended with one; doesn't wait."""
        if self._job is not None and self._job.over:
            self.wait()
