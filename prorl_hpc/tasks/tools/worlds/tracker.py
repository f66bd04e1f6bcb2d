"""A tracker of tickets: who works on what, how urgent it is, what was said."""

import random
from typing import Any

from prorl_hpc.records import JSON
from prorl_hpc.tasks.tools.worlds.base import (
    Mistake,
    Setting,
    State,
    Wish,
    World,
    flat,
    function,
    known,
    people,
    text,
)

STATUSES, PRIORITIES = ["open", "waiting", "closed"], ["low", "normal", "high", "urgent"]
LABELS = ("billing", "crash", "docs", "export", "login", "mobile", "search", "speed")
TEAMS = ("Backend", "Design", "Mobile", "Platform", "Support")
THINGS = ("button", "form", "invoice", "map", "menu", "page", "report", "table", "upload", "video")
FAULTS = ("is empty", "is slow", "is too small", "jumps", "looks wrong", "never ends", "won't open")
TICKET = text("Number of a ticket, like T-42.")
PERSON = text("Full name of a person.")
LABEL = text("Label.", enum=list(LABELS))


class Tracker(World):
    """Tickets and the people who work on them."""

    @function(
        "Finds tickets by all that is given; without anything, all of them.",
        status=text("Status.", enum=STATUSES, optional=True),
        assignee=text("Full name, or `nobody`.", optional=True),
        label=text("Label.", enum=list(LABELS), optional=True),
        title=text("Part of the title.", optional=True),
    )  # fmt: skip
    def find_tickets(
        self, status: str = "", assignee: str = "", label: str = "", title: str = ""
    ) -> JSON:
        return [
            {"ticket": number, **{k: v for k, v in one.items() if k != "comments"}}
            for number, one in self.state["tickets"].items()
            if status in ("", one["status"])
            and assignee in ("", one["assignee"])
            and (not label or label in one["labels"])
            and title.lower() in one["title"].lower()
        ]

    @function("Shows a ticket with its comments.", ticket=TICKET)
    def get_ticket(self, ticket: str) -> JSON:
        return {"ticket": ticket, **known(self.state["tickets"], ticket, "ticket")}

    @function("Lists the people of a team.", team=text("Team.", enum=list(TEAMS)))
    def list_team(self, team: str) -> JSON:
        return sorted(name for name, where in self.state["people"].items() if where == team)

    @function("Gives a ticket to a person.", ticket=TICKET, person=PERSON)
    def assign(self, ticket: str, person: str) -> JSON:
        known(self.state["people"], person, "person")
        self._open(ticket)["assignee"] = person
        return {"ticket": ticket, "assignee": person}

    @function("Sets the priority of a ticket.", ticket=TICKET,
              priority=text("Priority.", enum=PRIORITIES))  # fmt: skip
    def set_priority(self, ticket: str, priority: str) -> JSON:
        self._open(ticket)["priority"] = priority
        return {"ticket": ticket, "priority": priority}

    @function("Adds a label to a ticket.", ticket=TICKET, label=LABEL)
    def add_label(self, ticket: str, label: str) -> JSON:
        found = self._open(ticket)
        if label in found["labels"]:
            raise Mistake(f"{ticket} has the label {label!r} already")
        found["labels"] = sorted([*found["labels"], label])
        return {"ticket": ticket, "labels": found["labels"]}

    @function("Adds a comment to a ticket.", ticket=TICKET, words=text("What is said."))
    def comment(self, ticket: str, words: str) -> JSON:
        found = known(self.state["tickets"], ticket, "ticket")
        found["comments"] = [*found["comments"], words]
        return {"ticket": ticket, "comments": len(found["comments"])}

    @function("Closes a ticket. It must have a comment that says why.", ticket=TICKET)
    def close(self, ticket: str) -> JSON:
        found = self._open(ticket)
        if not found["comments"]:
            raise Mistake(f"{ticket} has no comment; add one that says why it is closed")
        found["status"] = "closed"
        return {"closed": ticket}

    def view(self) -> dict[str, str]:
        return flat("ticket", self.state["tickets"])

    def _open(self, ticket: str) -> dict[str, Any]:
        found: dict[str, Any] = known(self.state["tickets"], ticket, "ticket")
        if found["status"] == "closed":
            raise Mistake(f"{ticket} is closed; it can't be changed")
        return found


def fill(rng: random.Random, level: int) -> State:
    teams = rng.sample(TEAMS, 2 + level // 3)
    names = people(rng, len(teams) * (1 + level))
    folk = {name: teams[i % len(teams)] for i, name in enumerate(names)}
    titles = [f"The {thing} {fault}" for thing in THINGS for fault in FAULTS]
    tickets: dict[str, Any] = {}
    numbers = rng.sample(range(10, 1000), 5 + 4 * level)
    for number, title in zip(numbers, rng.sample(titles, len(numbers)), strict=True):
        tickets[f"T-{number}"] = {
            "title": title, "status": rng.choice(["open", "open", "waiting", "closed"]),
            "priority": rng.choice(PRIORITIES[:3]),
            "assignee": rng.choice([*names, "nobody", "nobody"]),
            "labels": sorted(rng.sample(LABELS[: 3 + level], rng.randint(0, 2))), "comments": [],
        }  # fmt: skip
    return {"made": 0, "people": folk, "tickets": tickets}


def _tickets(world: World, **wanted: str) -> list[str]:
    return [
        number
        for number, one in world.state["tickets"].items()
        if all(value in one["labels"] if key == "label" else one[key] == value
               for key, value in wanted.items())
    ]  # fmt: skip


def close_titled(rng: random.Random, world: World) -> Wish | None:
    """A comment, then the end of a ticket."""
    there = [n for n, one in world.state["tickets"].items() if one["status"] != "closed"]
    if not there:
        return None
    number = rng.choice(there)
    words = f"fixed in release {rng.randint(2, 9)}.{rng.randint(0, 20)}"
    title = world.state["tickets"][number]["title"]
    return Wish(
        text=f"Close the ticket '{title}' with the comment '{words}'.",
        calls=(("comment", {"ticket": number, "words": words}), ("close", {"ticket": number})),
    )


def hand_over(rng: random.Random, world: World) -> Wish | None:
    """All open tickets of one person to another."""
    one, two = rng.sample(list(world.state["people"]), 2)
    found = _tickets(world, assignee=one, status="open")
    if not found:
        return None
    return Wish(
        text=f"{one} is away. Give all tickets of status 'open' that {one} has to {two}.",
        calls=tuple(("assign", {"ticket": number, "person": two}) for number in found),
    )


def share_out(rng: random.Random, world: World) -> Wish | None:
    """Tickets of nobody to the one of a team with the least to do."""
    label, team = rng.choice(LABELS), rng.choice(list(world.state["people"].values()))
    found = _tickets(world, assignee="nobody", status="open", label=label)
    if not found:
        return None
    members = sorted(name for name, where in world.state["people"].items() if where == team)
    least = min(
        members, key=lambda name: (len(_tickets(world, assignee=name, status="open")), name)
    )
    return Wish(
        text=(
            f"Assign all tickets of status 'open' with the label '{label}' that nobody has to one "
            f"person of the team {team}: the one with the fewest tickets of status 'open', and "
            "among equals the first by alphabet."
        ),
        calls=tuple(("assign", {"ticket": number, "person": least}) for number in found),
    )


def make_urgent(rng: random.Random, world: World) -> Wish | None:
    label, status = rng.choice(LABELS), rng.choice(["open", "waiting"])
    found = [number for number in _tickets(world, label=label, status=status)
             if world.state["tickets"][number]["priority"] != "urgent"]  # fmt: skip
    if not found:
        return None
    return Wish(
        text=(
            f"Set the priority of every ticket of status '{status}' with the label '{label}' to "
            "urgent."
        ),
        calls=tuple(("set_priority", {"ticket": n, "priority": "urgent"}) for n in found),
    )


def label_person(rng: random.Random, world: World) -> Wish | None:
    name, label = rng.choice(list(world.state["people"])), rng.choice(LABELS)
    found = [number for number in _tickets(world, assignee=name, status="waiting")
             if label not in world.state["tickets"][number]["labels"]]  # fmt: skip
    if not found:
        return None
    return Wish(
        text=(
            f"Add the label '{label}' to every ticket of status 'waiting' that {name} has and that "
            "lacks it."
        ),
        calls=tuple(("add_label", {"ticket": number, "label": label}) for number in found),
    )


def how_many(rng: random.Random, world: World) -> Wish | None:
    team = rng.choice(list(world.state["people"].values()))
    members = [name for name, where in world.state["people"].items() if where == team]
    total = sum(len(_tickets(world, assignee=name, status="open")) for name in members)
    if total == 0:
        return None
    return Wish(
        text=f"How many tickets of status 'open' do the people of the team {team} have in all?",
        answer=str(total),
    )


def who_has(rng: random.Random, world: World) -> Wish | None:
    there = [o for o in world.state["tickets"].values() if o["assignee"] != "nobody"]
    if not there:
        return None
    one = rng.choice(there)
    return Wish(
        text=f"Who has the ticket '{one['title']}'? Give the full name.", answer=one["assignee"]
    )


SETTING = Setting(
    world=Tracker, fill=fill,
    errands=(close_titled, hand_over, share_out, make_urgent, label_person),
    questions=(how_many, who_has),
)  # fmt: skip
