"""A calendar with contacts. Times are minutes within a day, written HH:MM; days like 2025-03-04."""

import random
import re
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
    whole,
)

DAY, TIME = text("Day, like 2025-03-04."), text("Time, like 09:30.")
EVENT = text("Number of an event, like E-17.")
NAME = text("Full name of a contact.")
CITIES = ("Athens", "Bergen", "Cork", "Lima", "Oslo", "Porto", "Quito", "Siena", "Turin", "Zurich")
SUBJECTS = (
    "budget", "contract", "design", "hiring", "launch", "migration", "planning", "pricing",
    "quality", "release", "review", "roadmap", "sales", "security", "strategy", "training",
)  # fmt: skip
FORMS = ("call", "meeting", "session", "workshop")


def minutes_of(time: str) -> int:
    """Raises Mistake."""
    if not re.fullmatch(r"([01][0-9]|2[0-3]):[0-5][0-9]", time):
        raise Mistake(f"time {time[:20]!r} isn't like 09:30")
    return int(time[:2]) * 60 + int(time[3:])


def day_of(day: str) -> str:
    """Raises Mistake."""
    if not re.fullmatch(r"20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])", day):
        raise Mistake(f"day {day[:20]!r} isn't like 2025-03-04")
    return day


def clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"


class Calendar(World):
    """One calendar; two events never overlap."""

    @function(
        "Finds contacts by a part of their name, or by city; without either, all of them.",
        name=text("Part of a name.", optional=True), city=text("City.", optional=True),
    )  # fmt: skip
    def find_contacts(self, name: str = "", city: str = "") -> JSON:
        return [
            {"name": one, **fields}
            for one, fields in self.state["contacts"].items()
            if name.lower() in one.lower() and city.lower() in ("", fields["city"].lower())
        ]

    @function(
        "Changes a contact.", name=NAME,
        field=text("What to change.", enum=["city", "phone"]), value=text("The new value."),
    )  # fmt: skip
    def update_contact(self, name: str, field: str, value: str) -> JSON:
        known(self.state["contacts"], name, "contact")[field] = value
        return {"name": name, field: value}

    @function("Lists the events of a day, by time.", day=DAY)
    def list_events(self, day: str) -> JSON:
        return self._events(lambda one: one["day"] == day_of(day))

    @function("Finds events by a part of their title.", title=text("Part of the title."))
    def find_events(self, title: str) -> JSON:
        return self._events(lambda one: title.lower() in one["title"].lower())

    @function(
        "Makes an event.", title=text("Title."), day=DAY, start=TIME,
        minutes=whole("How long it is.", minimum=5, maximum=600),
        people={"type": "array", "items": NAME, "description": "Names of those invited."},
    )  # fmt: skip
    def create_event(
        self, title: str, day: str, start: str, minutes: int, people: list[str]
    ) -> JSON:
        invited = sorted(set(people))
        for name in invited:
            known(self.state["contacts"], name, "contact")
        begin = minutes_of(start)
        self._require_free(day_of(day), begin, int(minutes), besides="")
        number = self.next_id("E")
        self.state["events"][number] = {
            "title": title, "day": day, "start": begin, "minutes": int(minutes), "people": invited,
        }  # fmt: skip
        return {"event": number}

    @function("Moves an event to another day or time.", event=EVENT, day=DAY, start=TIME)
    def move_event(self, event: str, day: str, start: str) -> JSON:
        found = known(self.state["events"], event, "event")
        begin = minutes_of(start)
        self._require_free(day_of(day), begin, found["minutes"], besides=event)
        found["day"], found["start"] = day, begin
        return {"event": event, "day": day, "start": start}

    @function("Invites a contact to an event.", event=EVENT, name=NAME)
    def invite(self, event: str, name: str) -> JSON:
        found = known(self.state["events"], event, "event")
        known(self.state["contacts"], name, "contact")
        if name in found["people"]:
            raise Mistake(f"{name} is invited to {event} already")
        found["people"] = sorted([*found["people"], name])
        return {"event": event, "people": found["people"]}

    @function("Cancels an event.", event=EVENT)
    def cancel_event(self, event: str) -> JSON:
        known(self.state["events"], event, "event")
        del self.state["events"][event]
        return {"cancelled": event}

    def view(self) -> dict[str, str]:
        return flat("contact", self.state["contacts"]) | flat("event", self.state["events"])

    def _events(self, chosen: Any) -> list[dict[str, Any]]:
        found = [(number, one) for number, one in self.state["events"].items() if chosen(one)]
        found.sort(key=lambda pair: (pair[1]["day"], pair[1]["start"]))
        return [{"event": number, **one, "start": clock(one["start"])} for number, one in found]

    def _require_free(self, day: str, begin: int, minutes: int, *, besides: str) -> None:
        for number, one in self.state["events"].items():
            if number == besides or one["day"] != day:
                continue
            if begin < one["start"] + one["minutes"] and one["start"] < begin + minutes:
                raise Mistake(f"{number} ({one['title']}) takes place then; choose another time")


def _phone(rng: random.Random) -> str:
    return f"+{rng.randint(10**9, 10**10 - 1)}"


def fill(rng: random.Random, level: int) -> State:
    names = people(rng, 4 + 2 * level)
    contacts = {
        name: {
            "phone": f"+{rng.randint(10**9, 10**10 - 1)}",
            "city": rng.choice(CITIES[: 3 + level]),
        }
        for name in names
    }
    titles = [f"{subject.capitalize()} {form}" for subject in SUBJECTS for form in FORMS]
    numbers = rng.sample(range(10, 100), 4 + 4 * level)
    month = rng.randint(1, 12)
    days = [f"2025-{month:02}-{day:02}" for day in rng.sample(range(1, 29), 2 + level)]
    events: dict[str, Any] = {}
    taken: set[tuple[str, int]] = set()
    for number, title in zip(numbers, rng.sample(titles, len(numbers)), strict=True):
        day, hour = rng.choice(days), rng.randint(8, 17)
        if (day, hour) in taken:
            continue
        taken.add((day, hour))
        events[f"E-{number}"] = {
            "title": title, "day": day, "start": hour * 60, "minutes": rng.choice([15, 30, 45, 60]),
            "people": sorted(rng.sample(names, rng.randint(1, 3))),
        }  # fmt: skip
    return {"made": 0, "contacts": contacts, "events": events}


def _slot(rng: random.Random, world: World, minutes: int) -> tuple[str, int] | None:
    """A free time on a day that has events."""
    events = list(world.state["events"].values())
    day = rng.choice(events)["day"]
    begin = rng.randint(7, 19) * 60
    busy = [(one["start"], one["start"] + one["minutes"]) for one in events if one["day"] == day]
    free = all(begin + minutes <= start or end <= begin for start, end in busy)
    return (day, begin) if free else None


def move(rng: random.Random, world: World) -> Wish | None:
    if not world.state["events"]:
        return None
    number, event = rng.choice(list(world.state["events"].items()))
    slot = _slot(rng, world, event["minutes"])
    if slot is None or "-new-" in number:
        return None
    day, start = slot[0], clock(slot[1])
    if (event["day"], event["start"]) == slot:
        return None
    return Wish(
        text=f"Move the event '{event['title']}' to {day} at {start}.",
        calls=(("move_event", {"event": number, "day": day, "start": start}),),
    )


def cancel_with(rng: random.Random, world: World) -> Wish | None:
    """All events of a day in which somebody takes part."""
    if not world.state["events"]:
        return None
    event = rng.choice(list(world.state["events"].values()))
    day, person = event["day"], rng.choice(event["people"])
    found = [number for number, one in world.state["events"].items()
             if one["day"] == day and person in one["people"]]  # fmt: skip
    return Wish(
        text=f"Cancel every event on {day} to which {person} is invited.",
        calls=tuple(("cancel_event", {"event": number}) for number in found),
    )


def gather(rng: random.Random, world: World) -> Wish | None:
    """A new event with everybody of a city."""
    if not world.state["events"]:
        return None
    city = rng.choice([one["city"] for one in world.state["contacts"].values()])
    invited = sorted(n for n, one in world.state["contacts"].items() if one["city"] == city)
    minutes = rng.choice([20, 30, 40, 60])
    slot = _slot(rng, world, minutes)
    if slot is None:
        return None
    title = f"{city} {rng.choice(FORMS)} {rng.randint(2, 99)}"
    day, start = slot[0], clock(slot[1])
    return Wish(
        text=(
            f"Make the event '{title}' on {day} at {start}, {minutes} minutes long, and invite all "
            f"contacts who live in {city}."
        ),
        calls=(
            ("create_event", {"title": title, "day": day, "start": start, "minutes": minutes,
                              "people": invited}),
        ),
    )  # fmt: skip


def invite_more(rng: random.Random, world: World) -> Wish | None:
    """Somebody to the first event of a day."""
    events = world.state["events"]
    if not events:
        return None
    day = rng.choice(list(events.values()))["day"]
    number, event = min(
        ((n, one) for n, one in events.items() if one["day"] == day), key=lambda p: p[1]["start"]
    )
    others = sorted(set(world.state["contacts"]) - set(event["people"]))
    if not others or "-new-" in number:
        return None
    name = rng.choice(others)
    return Wish(
        text=f"Invite {name} to the first event on {day}.",
        calls=(("invite", {"event": number, "name": name}),),
    )


def new_phone(rng: random.Random, world: World) -> Wish | None:
    name, value = rng.choice(list(world.state["contacts"])), _phone(rng)
    return Wish(
        text=f"The phone number of {name} is now {value}; put it into the contacts.",
        calls=(("update_contact", {"name": name, "field": "phone", "value": value}),),
    )


def busy_minutes(rng: random.Random, world: World) -> Wish | None:
    if not world.state["events"]:
        return None
    day = rng.choice(list(world.state["events"].values()))["day"]
    total = sum(one["minutes"] for one in world.state["events"].values() if one["day"] == day)
    return Wish(
        text=f"How many minutes do the events on {day} take in all?",
        answer=str(total),
    )


def last_title(rng: random.Random, world: World) -> Wish | None:
    events = world.state["events"]
    if not events:
        return None
    day = rng.choice(list(events.values()))["day"]
    last = max((one for one in events.values() if one["day"] == day), key=lambda o: o["start"])
    return Wish(text=f"What is the title of the last event on {day}?", answer=last["title"])


SETTING = Setting(
    world=Calendar, fill=fill, errands=(move, cancel_with, gather, invite_more, new_phone),
    questions=(busy_minutes, last_title),
)  # fmt: skip
