"""A shop: products in stock and orders for them. Prices are whole cents."""

import random
from collections.abc import Callable
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

KINDS = ("bikes", "books", "garden", "kitchen", "lamps", "tools", "toys")
MAKES = ("Alto", "Bravo", "Corvo", "Delta", "Echo", "Fino", "Gusto", "Halo", "Ikon", "Juno")
PRODUCT = text("Number of a product, like P-310.")
QUANTITY = whole("How many.", minimum=1, maximum=10_000)


class Shop(World):
    """Orders take from the stock; cancelling gives back."""

    @function(
        "Finds products by a part of their name, or by category; without either, all of them.",
        name=text("Part of the name.", optional=True),
        category=text("Category.", enum=list(KINDS), optional=True),
    )  # fmt: skip
    def find_products(self, name: str = "", category: str = "") -> JSON:
        return [
            {"product": number, **one}
            for number, one in self.state["products"].items()
            if name.lower() in one["name"].lower() and category in ("", one["category"])
        ]

    @function("Lists the orders of a customer.", customer=text("Full name of the customer."))
    def find_orders(self, customer: str) -> JSON:
        orders = self.state["orders"].items()
        return [{"order": number, **one} for number, one in orders if one["customer"] == customer]

    @function(
        "Orders products for a customer.", customer=text("Full name of the customer."),
        lines={
            "type": "array", "minItems": 1, "description": "What is ordered.",
            "items": {"type": "object", "required": ["product", "quantity"],
                      "properties": {"product": PRODUCT, "quantity": QUANTITY}},
        },
    )  # fmt: skip
    def create_order(self, customer: str, lines: list[dict[str, Any]]) -> JSON:
        if customer not in self.state["customers"]:
            raise Mistake(f"there is no customer {customer[:60]!r}; give the full name")
        wanted: dict[str, int] = {}
        for line in lines:
            wanted[line["product"]] = wanted.get(line["product"], 0) + int(line["quantity"])
        for number, quantity in wanted.items():
            left = known(self.state["products"], number, "product")["stock"]
            if left < quantity:
                raise Mistake(f"only {left} of {number} are in stock; {quantity} can't be ordered")
        for number, quantity in wanted.items():
            self.state["products"][number]["stock"] -= quantity
        order = self.next_id("O")
        self.state["orders"][order] = {
            "customer": customer, "status": "open", "lines": dict(sorted(wanted.items()))
        }  # fmt: skip
        return {"order": order}

    @function("Cancels an open order; its products go back into stock.", order=text("Its number."))
    def cancel_order(self, order: str) -> JSON:
        found = known(self.state["orders"], order, "order")
        if found["status"] != "open":
            raise Mistake(f"{order} is {found['status']}; only open orders can be cancelled")
        found["status"] = "cancelled"
        for number, quantity in found["lines"].items():
            self.state["products"][number]["stock"] += quantity
        return {"cancelled": order}

    @function("Sets the price of a product.", product=PRODUCT,
              cents=whole("Price in cents.", minimum=1, maximum=10**7))  # fmt: skip
    def set_price(self, product: str, cents: int) -> JSON:
        known(self.state["products"], product, "product")["price"] = int(cents)
        return {"product": product, "price": int(cents)}

    @function("Adds to the stock of a product.", product=PRODUCT, quantity=QUANTITY)
    def add_stock(self, product: str, quantity: int) -> JSON:
        found = known(self.state["products"], product, "product")
        found["stock"] += int(quantity)
        return {"product": product, "stock": found["stock"]}

    def view(self) -> dict[str, str]:
        return flat("product", self.state["products"]) | flat("order", self.state["orders"])


def fill(rng: random.Random, level: int) -> State:
    customers = people(rng, 2 + level)
    kinds = rng.sample(KINDS, 2 + level // 2)
    names = [f"{make} {number}" for make in MAKES for number in (10, 20, 30, 40, 50)]
    count = 4 + 3 * level
    products: dict[str, Any] = {}
    numbers = rng.sample(range(100, 1000), count)
    prices = rng.sample(range(300, 30_000), count)
    for number, name, price in zip(numbers, rng.sample(names, count), prices, strict=True):
        products[f"P-{number}"] = {
            "name": name, "category": rng.choice(kinds), "price": price, "stock": rng.randint(0, 40)
        }  # fmt: skip
    orders: dict[str, Any] = {}
    for number in rng.sample(range(1000, 10_000), 2 + 3 * level):
        chosen = sorted(rng.sample(list(products), rng.randint(1, 2)))
        orders[f"O-{number}"] = {
            "customer": rng.choice(customers), "status": rng.choice(["open", "open", "sent"]),
            "lines": {product: rng.randint(1, 5) for product in chosen},
        }  # fmt: skip
    return {"made": 0, "customers": customers, "products": products, "orders": orders}


Chosen = Callable[[dict[str, Any]], bool]


def _products(world: World, chosen: Chosen) -> list[tuple[str, dict[str, Any]]]:
    return [(number, one) for number, one in world.state["products"].items() if chosen(one)]


def order(rng: random.Random, world: World) -> Wish | None:
    """Named products for a customer."""
    there = _products(world, lambda one: one["stock"] >= 2)
    if len(there) < 2:
        return None
    customer = rng.choice(world.state["customers"])
    lines = [
        (n, one, rng.randint(1, one["stock"])) for n, one in rng.sample(there, rng.randint(1, 2))
    ]
    words = " and ".join(f"{quantity} of '{one['name']}'" for _, one, quantity in lines)
    made = [{"product": number, "quantity": quantity} for number, _, quantity in lines]
    return Wish(
        text=f"Place one order for {customer}: {words}.",
        calls=(("create_order", {"customer": customer, "lines": made}),),
    )


def order_cheapest(rng: random.Random, world: World) -> Wish | None:
    """The cheapest of a category that there is enough of."""
    kind, quantity = rng.choice(KINDS), rng.randint(2, 15)
    there = _products(world, lambda one: one["category"] == kind and one["stock"] >= quantity)
    if not there:
        return None
    number, _ = min(there, key=lambda pair: pair[1]["price"])
    customer = rng.choice(world.state["customers"])
    return Wish(
        text=(
            f"Order {quantity} pieces of one product of the category '{kind}' for {customer}: of "
            "those with enough in stock, take the cheapest."
        ),
        calls=(("create_order", {"customer": customer,
                                 "lines": [{"product": number, "quantity": quantity}]}),),
    )  # fmt: skip


def cancel(rng: random.Random, world: World) -> Wish | None:
    """All open orders of a customer with some product."""
    opened = [one for one in world.state["orders"].values() if one["status"] == "open"]
    if not opened:
        return None
    one = rng.choice(opened)
    product = rng.choice(list(one["lines"]))
    found = [number for number, other in world.state["orders"].items()
             if other["customer"] == one["customer"] and other["status"] == "open"
             and product in other["lines"]]  # fmt: skip
    name = world.state["products"][product]["name"]
    return Wish(
        text=f"Cancel every open order of {one['customer']} that includes '{name}'.",
        calls=tuple(("cancel_order", {"order": number}) for number in found),
    )


def raise_prices(rng: random.Random, world: World) -> Wish | None:
    kind, cents = rng.choice(KINDS), rng.randint(10, 900)
    there = _products(world, lambda one: one["category"] == kind)
    if not there:
        return None
    return Wish(
        text=f"Raise the price of every product of the category '{kind}' by {money(cents)}.",
        calls=tuple(
            ("set_price", {"product": n, "cents": one["price"] + cents}) for n, one in there
        ),
    )


def restock(rng: random.Random, world: World) -> Wish | None:
    bound, goal = rng.randint(3, 15), rng.randint(20, 60)
    there = _products(world, lambda one: one["stock"] < bound)
    if not 0 < len(there) <= 8:
        return None
    return Wish(
        text=(
            f"Of every product with fewer than {bound} in stock, add as many as make it exactly "
            f"{goal}."
        ),
        calls=tuple(
            ("add_stock", {"product": n, "quantity": goal - one["stock"]}) for n, one in there
        ),
    )


def open_value(rng: random.Random, world: World) -> Wish | None:
    customer = rng.choice(world.state["customers"])
    products = world.state["products"]
    total = sum(
        products[number]["price"] * quantity
        for one in world.state["orders"].values()
        if one["customer"] == customer and one["status"] == "open"
        for number, quantity in one["lines"].items()
    )
    if total == 0:
        return None
    return Wish(
        text=f"What are the open orders of {customer} worth in all at today's prices, in cents?",
        answer=str(total),
    )


def dearest(rng: random.Random, world: World) -> Wish | None:
    kind = rng.choice(KINDS)
    there = _products(world, lambda one: one["category"] == kind and one["stock"] > 0)
    if not there:
        return None
    _, one = max(there, key=lambda pair: pair[1]["price"])
    return Wish(
        text=f"What is the name of the most expensive product of the category '{kind}' in stock?",
        answer=one["name"],
    )


SETTING = Setting(
    world=Shop, fill=fill, errands=(order, order_cheapest, cancel, raise_prices, restock),
    questions=(open_value, dearest),
)  # fmt: skip
