"""Balancing heavy-tailed completions over servers: ours beside round robin and lifetime counting.

A simulation with a virtual clock: each server decodes all its requests together, and slows down
past its batch. Prints one table: completion times and the time until all work is done; the limit is
the total work over all servers had it been split perfectly, or the longest completion by itself.

    python benchmarks/balancer.py
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from prorl_hpc.inference.balancer import Balancer, Ticket

NUM_SERVERS = 8
NUM_REQUESTS = 4000
CONCURRENT = 512
TOKENS_PER_SECOND = 1000.0
"""Of one server, however many requests share it (beyond the first few)."""
PER_REQUEST = 60.0
"""Most tokens per second of one request."""


@dataclass(slots=True)
class Server:
    """Requests that share one server's rate."""

    left: dict[int, float] = field(default_factory=dict)
    time: float = 0.0

    def rate(self) -> float:
        return min(PER_REQUEST, TOKENS_PER_SECOND / max(len(self.left), 1))

    def advance(self, time: float) -> None:
        made = (time - self.time) * self.rate()
        for request in self.left:
            self.left[request] -= made
        self.time = time

    def next_end(self) -> tuple[float, int] | None:
        if not self.left:
            return None
        request = min(self.left, key=lambda r: self.left[r])
        return self.time + max(self.left[request], 0.0) / self.rate(), request


Choose = Callable[[], tuple[int, Callable[[int], None]]]
"""-> (server, what to call with the number of tokens at the end)."""


def ours() -> Choose:
    balancer = Balancer()
    for server in range(NUM_SERVERS):
        balancer.join(str(server))

    def choose() -> tuple[int, Callable[[int], None]]:
        ticket = balancer.choose()
        assert isinstance(ticket, Ticket)
        return int(ticket.server), lambda n: balancer.done(ticket, num_tokens=n)

    return choose


def round_robin() -> Choose:
    turn = -1

    def choose() -> tuple[int, Callable[[int], None]]:
        nonlocal turn
        turn += 1
        return turn % NUM_SERVERS, lambda _: None

    return choose


def lifetime() -> Choose:
    """Fewest tokens given so far, as counted when they are finished."""
    totals = [0.0] * NUM_SERVERS

    def choose() -> tuple[int, Callable[[int], None]]:
        server = min(range(NUM_SERVERS), key=lambda s: totals[s])
        totals[server] += 1

        def done(n: int) -> None:
            totals[server] += n

        return server, done

    return choose


def simulate(choose: Choose, lengths: list[float]) -> tuple[list[float], float]:
    """Latency of each request, and the time of the last."""
    servers = [Server() for _ in range(NUM_SERVERS)]
    started: dict[int, float] = {}
    ends: dict[int, Callable[[int], None]] = {}
    waiting = list(range(len(lengths)))[::-1]
    latencies: list[float] = []
    clock = 0.0
    while waiting or started:
        while waiting and len(started) < CONCURRENT:
            request = waiting.pop()
            place, ends[request] = choose()
            servers[place].advance(clock)
            servers[place].left[request] = lengths[request]
            started[request] = clock
        events = [(end, i) for i, s in enumerate(servers) if (end := s.next_end()) is not None]
        heapq.heapify(events)
        (clock, request), place = events[0]
        servers[place].advance(clock)
        del servers[place].left[request]
        latencies.append(clock - started.pop(request))
        ends.pop(request)(int(lengths[request]))
    return latencies, clock


def main() -> None:
    rng = random.Random(0)
    lengths = [min(rng.lognormvariate(5.0, 1.3), 16384.0) for _ in range(NUM_REQUESTS)]
    limit = max(sum(lengths) / (NUM_SERVERS * TOKENS_PER_SECOND), max(lengths) / PER_REQUEST)
    print(f"{'policy':<16}{'mean s':>9}{'p99 s':>9}{'all done s':>12}{'of the limit':>14}")
    for name, make in (("ours", ours), ("round robin", round_robin), ("lifetime", lifetime)):
        latencies, whole = simulate(make(), lengths)
        ordered = sorted(latencies)
        p99 = ordered[int(0.99 * len(ordered))]
        mean = sum(latencies) / len(latencies)
        print(f"{name:<16}{mean:>9.2f}{p99:>9.2f}{whole:>12.1f}{limit / whole:>14.1%}")
    print(f"{'limit':<16}{'':>9}{'':>9}{limit:>12.1f}{1:>14.1%}")


if __name__ == "__main__":
    main()
