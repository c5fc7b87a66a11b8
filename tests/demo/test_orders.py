"""The orders of the demo: valid ones, and the intended share of invalid ones."""

import json
from collections import Counter
from pathlib import Path
from random import Random

from penstock.demo.shop import BASICS, OrderMessage, PriceList, generate_orders, special_offer

FIELDS = {"id", "customer", "product", "quantity", "placed_ms", "paid_ms"}


def made(count: int, *, specials: int = 0) -> list[list[OrderMessage]]:
    chance = Random(7)
    return [
        list(generate_orders(chance, now_ms=1_000, products=list(BASICS), specials=specials))
        for _ in range(count)
    ]


def parsed(message: OrderMessage) -> dict[str, object] | None:
    try:
        order = json.loads(message.value)
    except ValueError:
        return None
    return order if order.keys() == FIELDS and isinstance(order["quantity"], int) else None


def test_most_orders_are_good_and_keep_to_their_customer() -> None:
    sold = [each[0] for each in made(2_000)]
    good = [(message, order) for message in sold if (order := parsed(message)) is not None]
    assert len(good) > 1_900
    assert all(message.key.decode() == order["customer"] for message, order in good)


def test_every_kind_of_trouble_is_among_them() -> None:
    sold = made(2_000)
    good = [order for each in sold if (order := parsed(each[0])) is not None]
    late = sum(order["paid_ms"] > order["placed_ms"] for order in good)  # type: ignore[operator]
    unpriced = sum(order["product"] not in BASICS for order in good)
    twice = [each for each in sold if len(each) == 2]
    poison = len(sold) - len(good)
    assert min(late, unpriced, len(twice), poison) > 5
    assert all(first == second for first, second in twice)


def test_orders_have_ids_of_their_own() -> None:
    ids = Counter(each[0].id for each in made(2_000))
    assert max(ids.values()) == 1


def test_what_is_sold_next_has_no_price_yet() -> None:
    products = {order["product"] for each in made(500, specials=3) if (order := parsed(each[0])) is not None}
    assert products - BASICS.keys() == {special_offer(4)}


def test_a_price_that_is_entered_is_seen_by_all_and_kept(tmp_path: Path) -> None:
    mine, other = PriceList(tmp_path / "prices.json"), PriceList(tmp_path / "prices.json")
    assert other.all() == BASICS
    assert mine.add_special() == special_offer(1)
    assert special_offer(1) in other.all()
    assert other.add_special() == special_offer(2)
    assert mine.specials == 2
    assert PriceList(tmp_path / "prices.json").all().keys() == BASICS.keys() | {
        special_offer(1),
        special_offer(2),
    }
