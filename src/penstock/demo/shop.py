"""The shop: publishes orders at a steady rate, and waits where the broker is away."""

from __future__ import annotations

import time
from random import Random
from typing import Any, Final

from penstock.demo.names import ORDERS
from penstock.demo.orders import orders
from penstock.demo.parts import Part, client_settings
from penstock.demo.prices import PriceList
from penstock.protocol.letters import MESSAGE_ID

_STEP_S: Final = 0.1
_FLUSH_S: Final = 5.0


class Shop(Part):
    def __init__(self, bootstrap: str, prices: PriceList, *, per_s: float, chance: Random) -> None:
        super().__init__("shop")
        self._bootstrap = bootstrap
        self._prices = prices
        self._per_s = per_s
        self._chance = chance
        #: What it has sent twice.
        self.duplicates = 0

    def work(self) -> None:
        from confluent_kafka import Producer

        producer = Producer(
            {**client_settings(self._bootstrap, self.name), "enable.idempotence": True, "linger.ms": 20}
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
            orders(
                self._chance,
                now_ms=int(time.time() * 1000),
                products=list(self._prices.all()),
                specials=self._prices.specials,
            )
        )
        self.duplicates += len(made) - 1
        for each in made:
            producer.produce(
                ORDERS, key=each.key, value=each.value, headers={MESSAGE_ID: each.id}, on_delivery=self._told
            )

    def _told(self, error: Any, _: object) -> None:
        self.trouble = None if error is None else str(error.str())
