"""Which server gets the next request. Pure bookkeeping: knows no socket, no clock and no engine.

A server's work is the tokens it still has to make, as far as anyone can expect: a request counts
the mean length of what came out lately. A conversation stays where its prefix is cached, unless
that server has clearly more to do than the idlest one. A server that joins late starts with a small
window that doubles as its answers come in, so that it isn't flooded because it looks idle.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

FIRST_WINDOW = 4
"""Requests that a new server may have in flight at first."""

OPEN_WINDOW = 1024
"""From this window on, a server has none."""

DECAY = 0.98
"""Weight of the past in the mean length of completions."""

PROMPT_WEIGHT = 0.05
"""Work of a prompt token that isn't cached, in units of a sampled one."""

AFFINITY_SLACK = 2.0
"""A conversation moves away when its server has so many mean requests more than the idlest."""

MAX_CONVERSATIONS = 65536
"""Conversations whose place is remembered; the longest unused are forgotten."""


@dataclass(kw_only=True, slots=True, eq=False)
class Ticket:
    """A request that was given to a server."""

    server: str
    work: float


@dataclass(kw_only=True, slots=True)
class _Load:
    work: float = 0.0
    num_requests: int = 0
    num_foreign: int = 0
    window: float = FIRST_WINDOW
    draining: bool = False
    tickets: set[Ticket] = field(default_factory=set)

    def expected(self, per_request: float) -> float:
        """Work in flight, with that of other clients at the mean length."""
        return self.work + self.num_foreign * per_request


class Balancer:
    """Least expected work in flight, over the servers that are well."""

    def __init__(self, *, expected_tokens: float = 256.0, first_window: int = FIRST_WINDOW) -> None:
        """`expected_tokens` stands for the length of a completion until some were seen."""
        self._expected = expected_tokens
        self._first_window = first_window
        self._loads: dict[str, _Load] = {}
        self._places: OrderedDict[str, str] = OrderedDict()

    @property
    def servers(self) -> tuple[str, ...]:
        """Servers that take requests."""
        return tuple(name for name, load in self._loads.items() if not load.draining)

    @property
    def expected_tokens(self) -> float:
        """Mean length of recent completions."""
        return self._expected

    def in_flight(self, server: str) -> int:
        """Requests that a server has at the moment; 0 for one that is unknown."""
        load = self._loads.get(server)
        return load.num_requests if load else 0

    def join(self, server: str) -> None:
        """Adds a server, or takes a drained one back; it starts with a small window."""
        load = self._loads.setdefault(server, _Load())
        load.draining = False
        load.window = self._first_window

    def drain(self, server: str) -> None:
        """Gives it nothing more; what it has may end."""
        load = self._loads.get(server)
        if load is not None:
            load.draining = True

    def observe(self, server: str, *, num_requests: int) -> None:
        """A server said how many requests it has, those of other clients included."""
        load = self._loads.get(server)
        if load is not None:
            load.num_foreign = max(0, num_requests - load.num_requests)

    def leave(self, server: str) -> None:
        """Forgets a server and the conversations that were on it."""
        self._loads.pop(server, None)
        for affinity in [a for a, place in self._places.items() if place == server]:
            del self._places[affinity]

    def choose(
        self, affinity: str = "", *, num_prompt_tokens: int = 0, avoid: Collection[str] = ()
    ) -> Ticket | None:
        """A server for a request, counted as in flight until `done`; None when none is well.

        Servers in `avoid` failed it already: they are taken only when there is no other.
        """
        well = {name: load for name, load in self._loads.items() if not load.draining}
        well = {name: load for name, load in well.items() if name not in avoid} or well
        if not well:
            return None
        open_ = {n: load for n, load in well.items() if load.num_requests < int(load.window)}
        work_of = {name: load.expected(self._expected) for name, load in well.items()}
        idlest = min(open_ or well, key=lambda name: (work_of[name], name))
        home = self._places.get(affinity) if affinity else None
        chosen = idlest
        if home in well:
            slack = AFFINITY_SLACK * self._expected
            if work_of[home] <= work_of[idlest] + slack:
                chosen = home
        work = self._expected + (0.0 if chosen == home else PROMPT_WEIGHT * num_prompt_tokens)
        if affinity:
            self._remember(affinity, chosen)
        load = well[chosen]
        ticket = Ticket(server=chosen, work=work)
        load.tickets.add(ticket)
        load.work += work
        load.num_requests += 1
        return ticket

    def done(self, ticket: Ticket, *, num_tokens: int | None) -> None:
        """The request has ended with so many sampled tokens; None: it failed or was cancelled."""
        if num_tokens is not None:
            self._expected = max(1.0, DECAY * self._expected + (1 - DECAY) * num_tokens)
        load = self._loads.get(ticket.server)
        if load is None or ticket not in load.tickets:
            return
        load.tickets.remove(ticket)
        load.num_requests -= 1
        load.work = load.work - ticket.work if load.num_requests else 0.0
        if num_tokens is not None and load.window < OPEN_WINDOW:
            load.window += 1

    def _remember(self, affinity: str, server: str) -> None:
        self._places[affinity] = server
        self._places.move_to_end(affinity)
        if len(self._places) > MAX_CONVERSATIONS:
            self._places.popitem(last=False)
