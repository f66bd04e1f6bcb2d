"""Who talks to the buffer: attempts, sessions, last words. Pure: the clock is passed in."""

from collections import OrderedDict
from dataclasses import dataclass, field

from prorl_hpc.buffer.messages import AnyReply, Envelope

REMEMBERED_REPLIES = 256


@dataclass(kw_only=True, slots=True)
class Peer:
    """One worker (or the learner) in its newest attempt."""

    role: str
    worker: str
    attempt: int
    session: int
    heard: float
    announced: bool = False
    """Whether this session of the learner has said where it stands."""
    told_end: bool = False
    """Whether it has been answered since this attempt began to end."""
    retired: set[int] = field(default_factory=set)
    """Sessions of this worker that are fenced."""
    replies: "OrderedDict[int, AnyReply]" = field(default_factory=OrderedDict)

    def remember(self, request: int, reply: AnyReply) -> None:
        """Keeps a reply in case its request comes again."""
        self.replies[request] = reply
        while len(self.replies) > REMEMBERED_REPLIES:
            self.replies.popitem(last=False)


class Peers:
    """All peers of this attempt of the buffer."""

    def __init__(self) -> None:
        self._peers: dict[tuple[str, str], Peer] = {}

    def meet(self, role: str, envelope: Envelope, *, now: float) -> tuple[Peer | None, bool]:
        """(the peer, whether it has just replaced an older one); None when it is fenced."""
        key = (role, "" if role == "learner" else envelope.worker)
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = self._new(role, envelope, now=now, retired=set())
            return peer, False
        if envelope.attempt < peer.attempt or envelope.session in peer.retired:
            return None, False
        if envelope.session == peer.session:
            peer.heard = now
            return peer, False
        retired = peer.retired | {peer.session}
        self._peers[key] = self._new(role, envelope, now=now, retired=retired)
        return self._peers[key], True

    def newest(self, role: str) -> float | None:
        """When a peer of that role was last heard."""
        return max((p.heard for p in self._peers.values() if p.role == role), default=None)

    def of(self, role: str) -> list[Peer]:
        """All peers of that role."""
        return [p for p in self._peers.values() if p.role == role]

    def _new(self, role: str, envelope: Envelope, *, now: float, retired: set[int]) -> Peer:
        return Peer(
            role=role,
            worker=envelope.worker,
            attempt=envelope.attempt,
            session=envelope.session,
            heard=now,
            retired=retired,
        )
