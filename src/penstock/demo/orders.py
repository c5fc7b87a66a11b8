"""What a shop sends, as a pure function of chance: mostly good orders, and every trouble that real ones have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from penstock.demo.prices import special

CUSTOMERS: Final = 40
QUANTITY_MAX: Final = 5
#: How long a payment takes that is not there at once.
PAYMENT_MS: Final = (2_000, 12_000)
_CHANCE_OF_POISON: Final = 0.012
_CHANCE_OF_SPECIAL: Final = 0.03
_CHANCE_OF_LATE_PAYMENT: Final = 0.03
_CHANCE_OF_DUPLICATE: Final = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    #: The customer, so that the orders of each stay in order.
    key: bytes
    value: bytes
    #: The same for an order that is sent again.
    id: str


def orders(chance: Random, *, now_ms: int, products: Sequence[str], specials: int) -> Iterator[Message]:
    """One order, and now and then the same once more, as a client does that did not see its acknowledgement.

    `products` have prices; of the special offers the first `specials` do, and the next one is on sale already.
    """
    order = _order(chance, now_ms, products, specials)
    value = json.dumps(order, separators=(",", ":")).encode()
    if chance.random() < _CHANCE_OF_POISON:
        value = chance.choice(_POISONS)(order, value)
    message = Message(key=order["customer"].encode(), value=value, id=order["id"])
    yield message
    if chance.random() < _CHANCE_OF_DUPLICATE:
        yield message


def _order(chance: Random, now_ms: int, products: Sequence[str], specials: int) -> dict[str, Any]:
    is_new = chance.random() < _CHANCE_OF_SPECIAL
    late_ms = chance.randint(*PAYMENT_MS) if chance.random() < _CHANCE_OF_LATE_PAYMENT else 0
    return {
        "id": f"o-{chance.getrandbits(40):010x}",
        "customer": f"c-{chance.randrange(CUSTOMERS):03d}",
        "product": special(specials + 1) if is_new else chance.choice(products),
        "quantity": chance.randint(1, QUANTITY_MAX),
        "placed_ms": now_ms,
        "paid_ms": now_ms + late_ms,
    }


def _cut(order: dict[str, Any], value: bytes) -> bytes:
    return value[: len(value) // 2]


def _without_customer(order: dict[str, Any], value: bytes) -> bytes:
    return json.dumps({name: each for name, each in order.items() if name != "customer"}).encode()


def _in_words(order: dict[str, Any], value: bytes) -> bytes:
    return json.dumps({**order, "quantity": "a few"}).encode()


def _in_another_encoding(order: dict[str, Any], value: bytes) -> bytes:
    return value.replace(b'"product":"', b'"product":"\xfc')


_POISONS: Final = (_cut, _without_customer, _in_words, _in_another_encoding)
