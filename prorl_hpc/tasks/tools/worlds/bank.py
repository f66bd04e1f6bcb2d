"""A bank: accounts, transfers and cards. Amounts are whole cents."""

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
    money,
    people,
    text,
    whole,
)

ACCOUNT = text("Number of an account, like A-104.")
CARD = text("Number of a card, like C-201.")
OWNER = text("Full name of the customer.")


class Bank(World):
    """Accounts hold what their transfers leave."""

    @function("Lists the accounts of a customer: number, kind and balance in cents.", owner=OWNER)
    def find_accounts(self, owner: str) -> JSON:
        accounts = self.state["accounts"].items()
        found = [{"account": number, "kind": one["kind"], "balance": one["balance"]}
                 for number, one in accounts if one["owner"] == owner]  # fmt: skip
        if not found:
            raise Mistake(f"no accounts belong to {owner[:60]!r}; give the full name")
        return found

    @function("Lists all transfers into and out of an account, oldest first.", account=ACCOUNT)
    def list_transfers(self, account: str) -> JSON:
        known(self.state["accounts"], account, "account")
        return [one for one in self.state["transfers"] if account in (one["source"], one["target"])]

    @function(
        "Moves money from one account to another.", source=ACCOUNT, target=ACCOUNT,
        cents=whole("Amount in cents.", minimum=1), note=text("What it is for.", optional=True),
    )  # fmt: skip
    def transfer(self, source: str, target: str, cents: int, note: str = "") -> JSON:
        paying = known(self.state["accounts"], source, "account")
        paid = known(self.state["accounts"], target, "account")
        if source == target:
            raise Mistake("source and target are the same account")
        if paying["balance"] < cents:
            raise Mistake(f"{source} has {paying['balance']} cents only; {cents} can't be moved")
        paying["balance"] -= int(cents)
        paid["balance"] += int(cents)
        self.state["transfers"].append(
            {"source": source, "target": target, "cents": int(cents), "note": note}
        )
        return {"source_balance": paying["balance"], "target_balance": paid["balance"]}

    @function("Lists the cards of a customer: number, limit in cents, blocked.", owner=OWNER)
    def list_cards(self, owner: str) -> JSON:
        cards = self.state["cards"].items()
        return [{"card": number, "limit": one["limit"], "blocked": one["blocked"]}
                for number, one in cards if one["owner"] == owner]  # fmt: skip

    @function("Blocks a card.", card=CARD)
    def block_card(self, card: str) -> JSON:
        found = known(self.state["cards"], card, "card")
        if found["blocked"]:
            raise Mistake(f"{card} is blocked already")
        found["blocked"] = True
        return {"blocked": card}

    @function(
        "Sets the limit of a card.",
        card=CARD,
        cents=whole("Limit in cents.", minimum=0, maximum=10**7),
    )
    def set_limit(self, card: str, cents: int) -> JSON:
        found = known(self.state["cards"], card, "card")
        if found["blocked"]:
            raise Mistake(f"{card} is blocked; its limit can't be changed")
        found["limit"] = int(cents)
        return {"card": card, "limit": int(cents)}

    def view(self) -> dict[str, str]:
        sums: dict[str, int] = {}
        for one in self.state["transfers"]:
            pair = f"transfers/{one['source']}/{one['target']}"
            sums[pair] = sums.get(pair, 0) + one["cents"]
        return {
            **flat("account", self.state["accounts"]),
            **flat("card", self.state["cards"]),
            **{pair: str(total) for pair, total in sums.items()},
        }


def fill(rng: random.Random, level: int) -> State:
    owners = people(rng, 2 + level)
    numbers = iter(rng.sample(range(100, 1000), 6 * len(owners)))
    accounts: dict[str, Any] = {}
    cards: dict[str, Any] = {}
    for owner in owners:
        for kind in ["checking", "savings"]:
            balance = rng.randint(50_000, 900_000)
            accounts[f"A-{next(numbers)}"] = {"owner": owner, "kind": kind, "balance": balance}
        for _ in range(rng.randint(1, 2 + level // 2)):
            limit = rng.randint(1, 60) * 5000
            cards[f"C-{next(numbers)}"] = {
                "owner": owner, "limit": limit, "blocked": rng.random() < 0.2
            }  # fmt: skip
    transfers = []
    for _ in range(3 * level):
        source, target = rng.sample(list(accounts), 2)
        cents = rng.randint(100, 9000)
        transfers.append({"source": source, "target": target, "cents": cents, "note": "before"})
    return {"made": 0, "accounts": accounts, "cards": cards, "transfers": transfers}


def _owners(world: World) -> list[str]:
    return list(dict.fromkeys(one["owner"] for one in world.state["accounts"].values()))


def _account(world: World, owner: str, kind: str) -> tuple[str, int]:
    for number, one in world.state["accounts"].items():
        if one["owner"] == owner and one["kind"] == kind:
            return number, one["balance"]
    raise AssertionError(owner)


def pay(rng: random.Random, world: World) -> Wish | None:
    """From one customer to another."""
    one, two = rng.sample(_owners(world), 2)
    source, balance = _account(world, one, "checking")
    target, _ = _account(world, two, "savings")
    if balance < 200:
        return None
    cents = rng.randint(100, min(balance, 40_000))
    return Wish(
        text=(
            f"Move {money(cents)} from the checking account of {one} to the savings account of "
            f"{two}."
        ),
        calls=(("transfer", {"source": source, "target": target, "cents": cents}),),
    )


def save_rest(rng: random.Random, world: World) -> Wish | None:
    """All above a sum."""
    owner = rng.choice(_owners(world))
    source, balance = _account(world, owner, "checking")
    target, _ = _account(world, owner, "savings")
    keep = rng.randint(1, 400) * 100
    if balance <= keep:
        return None
    return Wish(
        text=(
            f"{owner} wants to keep exactly {money(keep)} in the checking account: move what is "
            "above that to the same customer's savings account, in one transfer."
        ),
        calls=(("transfer", {"source": source, "target": target, "cents": balance - keep}),),
    )


def even_out(rng: random.Random, world: World) -> Wish | None:
    """Equal balances."""
    owner = rng.choice(_owners(world))
    (one, first), (two, second) = (_account(world, owner, k) for k in ("checking", "savings"))
    cents = abs(first - second) // 2
    if cents == 0 or (first - second) % 2:
        return None
    source, target = (one, two) if first > second else (two, one)
    return Wish(
        text=f"With one transfer, make the balances of {owner}'s two accounts equal.",
        calls=(("transfer", {"source": source, "target": target, "cents": cents}),),
    )


def block_cards(rng: random.Random, world: World) -> Wish | None:
    """All cards above a limit."""
    owner, bound = rng.choice(_owners(world)), rng.randint(1, 50) * 5000
    found = [number for number, one in world.state["cards"].items()
             if one["owner"] == owner and not one["blocked"] and one["limit"] > bound]  # fmt: skip
    if not found:
        return None
    return Wish(
        text=(
            f"Block every card of {owner} that isn't blocked yet and has a limit above "
            f"{money(bound)}."
        ),
        calls=tuple(("block_card", {"card": number}) for number in found),
    )


def lower_limits(rng: random.Random, world: World) -> Wish | None:
    """Limits of a customer's open cards."""
    owner, limit = rng.choice(_owners(world)), rng.randint(1, 40) * 2500
    found = [number for number, one in world.state["cards"].items()
             if one["owner"] == owner and not one["blocked"] and one["limit"] != limit]  # fmt: skip
    if not found:
        return None
    return Wish(
        text=f"Set the limit of all of {owner}'s cards that aren't blocked to {money(limit)}.",
        calls=tuple(("set_limit", {"card": number, "cents": limit}) for number in found),
    )


def total_balance(rng: random.Random, world: World) -> Wish | None:
    owner = rng.choice(_owners(world))
    total = sum(o["balance"] for o in world.state["accounts"].values() if o["owner"] == owner)
    return Wish(
        text=f"How much money does {owner} have in all accounts together, in cents?",
        answer=str(total),
    )


def received(rng: random.Random, world: World) -> Wish | None:
    owner, kind = rng.choice(_owners(world)), rng.choice(["checking", "savings"])
    number, _ = _account(world, owner, kind)
    total = sum(one["cents"] for one in world.state["transfers"] if one["target"] == number)
    if total == 0:
        return None
    return Wish(
        text=f"How many cents were moved into the {kind} account of {owner} by transfers, in all?",
        answer=str(total),
    )


SETTING = Setting(
    world=Bank, fill=fill, errands=(pay, save_rest, even_out, block_cards, lower_limits),
    questions=(total_balance, received),
)  # fmt: skip
