"""Announces one inference job while it is well. Writes one small file; decides nothing else."""

import logging
import time
from collections.abc import Callable
from typing import Any

from hpc.allocation import Allocation
from prorl_hpc.inference.announce import BEAT_SECONDS, Announcement, announce, withdraw
from prorl_hpc.run import Run

log = logging.getLogger("prorl_hpc.inference")


class Herald:
    """The announcement of one process, with its beat."""

    def __init__(
        self,
        run: Run,
        allocation: Allocation,
        *,
        identity: str,
        at: tuple[Any, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`at` is the address of the listening socket."""
        self._run = run
        self._allocation = allocation
        self._identity = identity
        self._host, self._port = str(at[0]), int(at[1])
        self._clock = clock
        self._beat = 0
        self._told: float | None = None
        self.fenced = False
        """A newer attempt of this job has announced itself."""

    @property
    def place(self) -> str:
        return f"{self._host}:{self._port}"

    def tell(self, trouble: str, *, version: int, in_flight: int) -> None:
        """Announces the server when a beat is due; takes the file back while there is trouble."""
        now = self._clock()
        if trouble:
            if self._told is not None:
                log.warning("not announced any more: %s", trouble)
                self.withdraw()
            return
        if self._told is not None and now - self._told < BEAT_SECONDS:
            return
        self._beat += 1
        announcement = Announcement(
            run=self._run.name,
            index=self._allocation.index,
            attempt=self._allocation.attempt,
            host=self._host,
            port=self._port,
            identity=self._identity,
            beat=self._beat,
            version=version,
            in_flight=in_flight,
            job_id=self._allocation.job_id,
        )
        try:
            self.fenced = not announce(self._run, announcement)
        except OSError as err:  # a full disk: the next round tries again
            log.warning("can't be announced: %s", err)
            return
        self._told = now

    def withdraw(self) -> None:
        """Takes the announcement back, if it is still this process's."""
        self._told = None
        try:
            withdraw(self._run, index=self._allocation.index, identity=self._identity)
        except OSError as err:
            log.warning("the announcement can't be taken back: %s", err)
