"""The shop: publishes orders at a steady rate, and waits while the broker is down.

Orders depend only on the random generator: most are good, and some have the problems that real orders have. The price
list is a file that people edit while orders flow; orders for products without a price become dead letters.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from penstock.demo.access import BrokerAccess
from penstock.demo.component import Component
from penstock.demo.names import ORDERS
from penstock.protocol.dead_letter_headers import MESSAGE_ID

BASICS: Final = {
    "apples": 2.4,
    "bread": 3.2,
    "cheese": 6.5,
    "coffee": 8.9,
    "honey": 5.8,
    "olives": 4.1,
}
_SPECIAL: Final = "special offer "
_SPECIAL_PRICE: Final = 9.9


def special_offer(number: int) -> str:
    """The name of the special offer with this number, from 1."""
    return f"{_SPECIAL}{number}"


class PriceList:
    """The price list of one process, which reads the file again when it was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: tuple[int, int] | None = None
        self._prices: dict[str, float] = {}

    def all(self) -> dict[str, float]:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return BASICS
        version = (found.st_ino, found.st_mtime_ns)
        if version != self._version:
            self._prices = json.loads(self._path.read_text())
            self._version = version
        return self._prices

    @property
    def specials(self) -> int:
        """How many special offers have a price."""
        return sum(product.startswith(_SPECIAL) for product in self.all())

    def add_special(self) -> str:
        """Gives the next special offer its price, and returns its name."""
        product = special_offer(self.specials + 1)
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps({**self.all(), product: _SPECIAL_PRICE}, indent=2))
        temporary.replace(self._path)
        return product


CUSTOMERS: Final = 40
QUANTITY_MAX: Final = 5
#: How long a late payment takes.
PAYMENT_MS: Final = (2_000, 12_000)
_CHANCE_OF_POISON: Final = 0.012
_CHANCE_OF_SPECIAL: Final = 0.03
_CHANCE_OF_LATE_PAYMENT: Final = 0.03
_CHANCE_OF_DUPLICATE: Final = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderMessage:
    #: The customer, so that the orders of one customer stay in order.
    key: bytes
    value: bytes
    #: The same for both copies of an order that is sent twice.
    id: str


def generate_orders(
    chance: Random, *, now_ms: int, products: Sequence[str], specials: int
) -> Iterator[OrderMessage]:
    """One order, and sometimes its duplicate, which a client sends if it has missed the acknowledgement.

    All `products` have prices. So do the first `specials` special offers; the next one is on sale without a price.
    """
    order = _random_order(chance, now_ms, products, specials)
    value = json.dumps(order, separators=(",", ":")).encode()
    if chance.random() < _CHANCE_OF_POISON:
        value = chance.choice(_POISONS)(order, value)
    message = OrderMessage(key=order["customer"].encode(), value=value, id=order["id"])
    yield message
    if chance.random() < _CHANCE_OF_DUPLICATE:
        yield message


def _random_order(chance: Random, now_ms: int, products: Sequence[str], specials: int) -> dict[str, Any]:
    is_new = chance.random() < _CHANCE_OF_SPECIAL
    late_ms = chance.randint(*PAYMENT_MS) if chance.random() < _CHANCE_OF_LATE_PAYMENT else 0
    return {
        "id": f"o-{chance.getrandbits(40):010x}",
        "customer": f"c-{chance.randrange(CUSTOMERS):03d}",
        "product": special_offer(specials + 1) if is_new else chance.choice(products),
        "quantity": chance.randint(1, QUANTITY_MAX),
        "placed_ms": now_ms,
        "paid_ms": now_ms + late_ms,
    }


def _truncated(order: dict[str, Any], value: bytes) -> bytes:
    return value[: len(value) // 2]


def _without_customer(order: dict[str, Any], value: bytes) -> bytes:
    return json.dumps({name: each for name, each in order.items() if name != "customer"}).encode()


def _with_text_quantity(order: dict[str, Any], value: bytes) -> bytes:
    return json.dumps({**order, "quantity": "a few"}).encode()


def _in_another_encoding(order: dict[str, Any], value: bytes) -> bytes:
    return value.replace(b'"product":"', b'"product":"\xfc')


_POISONS: Final = (_truncated, _without_customer, _with_text_quantity, _in_another_encoding)


_STEP_S: Final = 0.1
_FLUSH_S: Final = 5.0


class Shop(Component):
    def __init__(self, access: BrokerAccess, prices: PriceList, *, per_s: float, chance: Random) -> None:
        super().__init__("shop")
        self._access = access
        self._prices = prices
        self._per_s = per_s
        self._chance = chance
        #: The number of orders that were sent twice.
        self.duplicates = 0

    def work(self) -> None:
        from confluent_kafka import Producer

        producer = Producer(
            {**self._access.librdkafka(self.name), "enable.idempotence": True, "linger.ms": 20}
        )
        owed, then = 1.0, time.monotonic()
        while not self.stopping.wait(_STEP_S):
            now = time.monotonic()
            owed, then = min(owed + (now - then) * self._per_s, self._per_s), now
            while owed >= 1:
                owed -= 1
                self._sell(producer)
            producer.poll(0)
        producer.flush(_FLUSH_S)

    def _sell(self, producer: Any) -> None:
        made = list(
            generate_orders(
                self._chance,
                now_ms=int(time.time() * 1000),
                products=list(self._prices.all()),
                specials=self._prices.specials,
            )
        )
        self.duplicates += len(made) - 1
        for each in made:
            producer.produce(
                ORDERS,
                key=each.key,
                value=each.value,
                headers={MESSAGE_ID: each.id},
                on_delivery=self._on_delivery,
            )

    def _on_delivery(self, error: Any, _: object) -> None:
        self.trouble = None if error is None else str(error.str())
