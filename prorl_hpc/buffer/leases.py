"""Leases and the nodes that hold them: soft state, gone with a restart. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Held:
    """One lease in force."""

    lease_id: int
    worker: str
    group_id: int
    rollouts: set[int]
    """Rollouts that have not been pushed yet."""
    issued: float
    expires: float


class LeaseBook:
    """All leases in force, by id and by worker."""

    def __init__(self, *, lease_seconds: float, first_id: int) -> None:
        self._lease_seconds = lease_seconds
        self._next_id = first_id
        self._leases: dict[int, Held] = {}
        self._by_worker: dict[str, set[int]] = {}
        self._heard: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def heard(self, worker: str, *, now: float) -> None:
        """The worker lives."""
        self._heard[worker] = now

    def num_workers(self, *, now: float) -> int:
        """Workers heard within one lease term."""
        return sum(now - heard <= self._lease_seconds for heard in self._heard.values())

    def grant(
        self,
        worker: str,
        group_id: int,
        rollouts: Iterable[int],
        *,
        now: float,
        lease_id: int | None = None,
    ) -> Held:
        """A new lease, or an old one in force again under its own id."""
        if lease_id is None:
            lease_id, self._next_id = self._next_id, self._next_id + 1
        held = Held(
            lease_id=lease_id,
            worker=worker,
            group_id=group_id,
            rollouts=set(rollouts),
            issued=now,
            expires=now + self._lease_seconds,
        )
        self._leases[held.lease_id] = held
        self._by_worker.setdefault(worker, set()).add(held.lease_id)
        return held

    def renew(self, worker: str, lease_id: int, *, now: float) -> bool:
        """Prolongs a lease; False when it isn't the worker's (any more)."""
        held = self._leases.get(lease_id)
        if held is None or held.worker != worker:
            return False
        held.expires = now + self._lease_seconds
        return True

    def of(self, worker: str) -> list[Held]:
        """The worker's leases."""
        return [self._leases[i] for i in sorted(self._by_worker.get(worker, ()))]

    def done(self, lease_id: int, rollout: int) -> None:
        """A rollout of the lease came in; the lease ends with its last one."""
        held = self._leases.get(lease_id)
        if held is not None:
            held.rollouts.discard(rollout)
            if not held.rollouts:
                self.end(lease_id)

    def end(self, lease_id: int) -> Held | None:
        """Takes the lease out of force; None when it was already."""
        held = self._leases.pop(lease_id, None)
        if held is not None:
            self._by_worker[held.worker].discard(lease_id)
        return held

    def expired(self, *, now: float) -> list[int]:
        """Leases whose node has been silent for too long."""
        return [i for i, held in self._leases.items() if now >= held.expires]
