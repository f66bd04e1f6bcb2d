"""Placement: least expected work, affinity, drained and late servers."""

from hypothesis import given
from hypothesis import strategies as st

from prorl_hpc.inference.balancer import FIRST_WINDOW, Balancer, Ticket


def balancer(*servers: str, expected_tokens: float = 100.0) -> Balancer:
    made = Balancer(expected_tokens=expected_tokens)
    for server in servers:
        made.join(server)
    return made


def take(made: Balancer, affinity: str = "", **more: object) -> Ticket:
    ticket = made.choose(affinity, **more)  # type: ignore[arg-type]
    assert ticket is not None
    return ticket


def warm(made: Balancer, server: str, others: tuple[str, ...], num: int = 2000) -> None:
    """Opens a server's window by letting it answer."""
    for other in others:
        made.drain(other)
    for _ in range(num):
        made.done(take(made), num_tokens=int(made.expected_tokens))
    for other in others:
        made.join(other)


def test_requests_spread_over_idle_servers() -> None:
    made = balancer("a", "b", "c")
    assert sorted(take(made).server for _ in range(3)) == ["a", "b", "c"]


def test_a_finished_request_makes_room() -> None:
    made = balancer("a", "b")
    first = take(made)
    take(made)
    made.done(first, num_tokens=100)
    assert take(made).server == first.server


def test_a_conversation_stays_where_its_prefix_is() -> None:
    made = balancer("a", "b")
    home = take(made, "talk")
    made.done(home, num_tokens=100)
    take(made)  # the other server is as idle; by name the first would be next
    assert take(made, "talk").server == home.server


def test_a_conversation_leaves_a_server_that_is_much_busier() -> None:
    made = balancer("a", "b")
    warm(made, "a", ("b",))
    warm(made, "b", ("a",))
    warm(made, "a", ("b",))
    made.done(take(made, "talk"), num_tokens=100)
    home = take(made, "talk")
    others = [take(made, f"x{i}") for i in range(8)]
    for ticket in others:
        if ticket.server != home.server:
            made.done(ticket, num_tokens=100)
    # home has 5 requests of ~100 tokens, the other none: more than two apart
    assert take(made, "talk").server != home.server


def test_a_drained_server_gets_nothing_and_none_left_is_none() -> None:
    made = balancer("a", "b")
    made.drain("a")
    assert {take(made).server for _ in range(5)} == {"b"}
    made.drain("b")
    assert made.choose() is None
    made.join("a")
    assert take(made).server == "a"


def test_a_server_that_failed_a_request_is_avoided_while_there_is_another() -> None:
    made = balancer("a", "b")
    assert take(made, avoid={"a"}).server == "b"
    made.leave("b")
    assert take(made, avoid={"a"}).server == "a"


def test_a_late_server_is_not_flooded() -> None:
    made = balancer("a")
    warm(made, "a", ())
    running = [take(made) for _ in range(200)]
    made.join("late")
    for _ in range(50):
        take(made)
    assert made.in_flight("late") == FIRST_WINDOW
    assert made.in_flight("a") == len(running) + 50 - FIRST_WINDOW


def test_its_window_doubles_as_answers_come_in() -> None:
    made = balancer("a")
    warm(made, "a", ())
    for _ in range(200):
        take(made)
    made.join("late")
    tickets = [take(made) for _ in range(FIRST_WINDOW)]
    for ticket in tickets:
        made.done(ticket, num_tokens=100)
    for _ in range(50):
        take(made)
    assert made.in_flight("late") == 2 * FIRST_WINDOW


def test_the_expected_length_follows_what_came_out() -> None:
    made = balancer("a", expected_tokens=100.0)
    made.done(take(made), num_tokens=200)
    assert made.expected_tokens == 0.98 * 100 + 0.02 * 200
    made.done(take(made), num_tokens=None)  # a failed one says nothing
    assert made.expected_tokens == 102.0


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "done", "join", "drain", "leave"]), st.integers(0, 9)),
        max_size=80,
    )
)
def test_counts_never_go_astray(steps: list[tuple[str, int]]) -> None:
    made = balancer("s0", "s1")
    tickets: list[Ticket] = []
    for what, number in steps:
        server = f"s{number % 3}"
        if what == "take":
            ticket = made.choose(f"c{number}")
            if ticket is not None:
                tickets.append(ticket)
        elif what == "done" and tickets:
            made.done(tickets.pop(number % len(tickets)), num_tokens=number)
        elif what == "join":
            made.join(server)
        elif what == "drain":
            made.drain(server)
        elif what == "leave":
            made.leave(server)
    for ticket in tickets:
        made.done(ticket, num_tokens=None)
    assert [made.in_flight(f"s{n}") for n in range(3)] == [0, 0, 0]


def test_requests_of_other_clients_weigh_as_much_as_ours() -> None:
    made = balancer("a", "b")
    made.observe("a", num_requests=3)  # three of somebody else's
    assert [take(made).server for _ in range(3)] == ["b", "b", "b"]
    # Three each by now: by name the first is next. Ours on b are no strangers.
    made.observe("b", num_requests=3)
    assert take(made).server == "a"
    made.observe("a", num_requests=1)
    made.observe("unknown", num_requests=9)
    assert take(made).server == "a"


def test_a_late_server_shared_by_many_clients_starts_with_a_smaller_window() -> None:
    made = Balancer(expected_tokens=100.0, first_window=1)
    made.join("old")
    warm(made, "old", ())
    for _ in range(20):
        take(made)
    made.join("late")
    assert [take(made).server for _ in range(4)] == ["late", "old", "old", "old"]
