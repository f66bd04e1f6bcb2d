"""The buffer as the learner sees it: announce, take, validate. Knows no dispatcher and no shard."""

import threading
import time
from contextlib import suppress

import msgspec

from prorl_hpc.buffer.channel import BlockingChannel, Identity, Locate, expect, locator
from prorl_hpc.buffer.keys import ClientKeys
from prorl_hpc.buffer.messages import (
    Announce,
    AnyRequest,
    Damaged,
    Done,
    Finish,
    GroupIds,
    GroupRef,
    Phase,
    Progress,
    Pulse,
    Refused,
    StatusReply,
    StatusRequest,
    Take,
    TakeReply,
    Validate,
    ValidationQuery,
    ValidationReply,
    WireError,
)

PATIENCE_SECONDS = 300.0


class LearnerClient:
    """The learner's side: blocking, for one thread; a second thread keeps the buffer informed.

    Every announcement fences older attempts of the learner. A restarted buffer asks for the
    announcement again; the client gives it by itself, with the groups taken meanwhile.
    """

    def __init__(
        self,
        locate: Locate | str,
        *,
        keys: ClientKeys,
        run: str,
        attempt: int,
        worker: str = "learner",
        patience_seconds: float = PATIENCE_SECONDS,
        pulse_seconds: float = 10.0,
    ) -> None:
        self._locate = locator(locate)
        self._keys = keys
        self._identity = Identity(run=run, worker=worker, attempt=attempt)
        self._patience_seconds = patience_seconds
        self._channel = self._open()
        self._announced: Announce | None = None
        self._held = GroupIds()
        self._validations: dict[int, Validate] = {}
        self._stop = threading.Event()
        self._pulse_seconds = pulse_seconds
        self._pulse: threading.Thread | None = None
        self.phase: Phase = "running"

    def announce(self, version: int, *, consumed: GroupIds, filtered: int, step: int) -> None:
        """Says where the learner stands (its checkpoint's cursor). First call of every attempt.

        `consumed`: training groups of the surviving history, whether trained, filtered out or
        dropped as stale; `filtered`: how many of them gave no sample (total). Raises Fenced when a
        newer attempt has announced itself.
        """
        self._held = GroupIds()
        self._announced = Announce(
            version=version, step=step, consumed=consumed, held=GroupIds(), filtered=filtered
        )
        self._done(self._announced)
        if self._pulse is None and self._pulse_seconds > 0:
            self._pulse = threading.Thread(target=self._beat, name="buffer-pulse", daemon=True)
            self._pulse.start()

    def take(self, num_groups: int, *, timeout_seconds: float) -> list[GroupRef]:
        """Closed training groups, each handed out once; fewer (or none) when time is up.

        May take a little longer than `timeout_seconds` while the buffer restarts.
        """
        deadline = time.monotonic() + timeout_seconds
        taken: list[GroupRef] = []
        while len(taken) < num_groups:
            left = max(deadline - time.monotonic(), 0.0)
            ask = Take(num_groups=num_groups - len(taken), timeout_seconds=min(left, 20.0))
            reply = expect(self._ask(ask, wait_seconds=ask.timeout_seconds), TakeReply)
            self.phase = reply.phase
            taken.extend(reply.groups)
            self._held = self._held.union(ref.group_id for ref in reply.groups)
            if time.monotonic() >= deadline or self.phase != "running":
                break
        return taken

    def published(self, version: int) -> None:
        """A newer policy version is on disk."""
        self._progress(Progress(version=version))

    def filtered(self, total: int) -> None:
        """Total of groups consumed without a training sample: as many more may be leased."""
        self._progress(Progress(filtered=total))

    def checkpointed(self, step: int, consumed: GroupIds) -> None:
        """A checkpoint with this cursor is durable."""
        self._progress(Progress(step=step, checkpointed=consumed))

    def validate(self, version: int, counts: dict[str, int], num_rollouts: int) -> None:
        """Asks for a validation of `version`: the first `counts[task]` instances of each task,
        or all of a task that has fewer.
        """
        ask = Validate(version=version, counts=counts, num_rollouts=num_rollouts)
        # An older one that nobody waits for any more isn't asked for again after a restart.
        self._validations = {version: ask}
        self._done(ask)

    def validation_results(
        self, version: int, timeout_seconds: float = 0.0
    ) -> list[GroupRef] | None:
        """Its groups once all are closed (without those given up), or None when time is up."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            ask = ValidationQuery(version=version, timeout_seconds=min(left, 20.0))
            reply = expect(self._ask(ask, wait_seconds=ask.timeout_seconds), ValidationReply)
            if reply.groups is not None:
                self._validations.pop(version, None)
                return list(reply.groups)
            if time.monotonic() >= deadline:
                return None

    def validation_given_up(self, version: int) -> int:
        """Instances of a validation that will never come back (infrastructure failures)."""
        return self.validation_progress(version).num_dropped

    def validation_progress(self, version: int) -> ValidationReply:
        """What there is of a validation just now, and how much is missing or was given up."""
        ask = ValidationQuery(version=version, timeout_seconds=0.0)
        return expect(self._ask(ask), ValidationReply)

    def damaged(self, shard: int, *, group_id: int, reason: str) -> None:
        """Reports a shard that can't be read; `group_id` will come again, made anew."""
        self._held = self._held.minus([group_id])
        self._done(Damaged(shard=shard, group_id=group_id, reason=reason))

    def heartbeat(self) -> Phase:
        """Tells the buffer that the learner lives (the pulse thread does it too)."""
        self._done(Pulse())
        return self.phase

    def status(self) -> StatusReply:
        """How the buffer is doing."""
        return expect(self._ask(StatusRequest()), StatusReply)

    def finish(self, reason: str) -> None:
        """The run is done: rollout nodes and buffer end."""
        self._done(Finish(reason=reason))

    def close(self) -> None:
        """Stops the pulse and drops the socket."""
        self._stop.set()
        if self._pulse is not None:
            self._pulse.join(timeout=10)
        self._channel.close()

    def _progress(self, change: Progress) -> None:
        if self._announced is not None:
            old = self._announced
            self._announced = msgspec.structs.replace(
                old,
                version=old.version if change.version is None else change.version,
                step=old.step if change.step is None else change.step,
                filtered=old.filtered if change.filtered is None else change.filtered,
            )
        self._done(change)

    def _done(self, body: AnyRequest) -> None:
        self.phase = expect(self._ask(body), Done).phase

    def _ask(self, body: AnyRequest, *, wait_seconds: float = 0.0) -> object:
        try:
            return self._channel.ask(body, wait_seconds=wait_seconds)
        except Refused as err:
            if self._announced is None or err.code != "announce":
                raise
        again = msgspec.structs.replace(self._announced, held=self._held)
        self._channel.ask(again)
        for validation in self._validations.values():
            self._channel.ask(validation)
        return self._channel.ask(body, wait_seconds=wait_seconds)

    def _open(self) -> BlockingChannel:
        return BlockingChannel(
            self._locate,
            keys=self._keys,
            identity=self._identity,
            patience_seconds=self._patience_seconds,
        )

    def _beat(self) -> None:
        channel = BlockingChannel(
            self._locate, keys=self._keys, identity=self._identity, patience_seconds=5.0
        )
        try:
            while not self._stop.wait(self._pulse_seconds):
                # The main thread hears of a lost or fencing buffer by its own next request.
                with suppress(WireError):
                    channel.ask(Pulse())
        finally:
            channel.close()
