"""The subscribers of the demo.

Billing is a plain consumer, as any Kafka client can be: it reads orders as a group and commits what it has read.
Shipping is an application with delivery contracts: orders are packed exactly once, and parcels are retried until they
are delivered or become dead letters. Packing and delivery are pure functions, apart from the lock of `Roads`.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import Any, Final
from zlib import crc32

from penstock.client import Message
from penstock.demo.access import BrokerAccess
from penstock.demo.component import Component
from penstock.demo.names import BILLING, ORDERS, PACKING, PARCELS, SHIPPING

_POLL_S: Final = 0.2
_RECORDS_MAX: Final = 500
_COMMIT_EVERY_S: Final = 0.25


class Billing(Component):
    def __init__(self, access: BrokerAccess) -> None:
        super().__init__(BILLING)
        self._access = access
        #: Orders that it has read since the demo started.
        self.read = 0

    def work(self) -> None:
        from confluent_kafka import Consumer

        settings = {
            **self._access.librdkafka(self.name),
            "group.id": BILLING,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
        consumer = Consumer(settings)
        try:
            consumer.subscribe([ORDERS])
            self._bill(consumer)
        finally:
            consumer.close()

    def _bill(self, consumer: Any) -> None:
        from confluent_kafka import KafkaException

        committed_at, is_owed = time.monotonic(), False
        while not self.stopping.is_set():
            for message in consumer.consume(_RECORDS_MAX, _POLL_S):
                if message.error() is not None:
                    raise KafkaException(message.error())
                self.read += 1
                self.trouble, is_owed = None, True
            if is_owed and time.monotonic() - committed_at >= _COMMIT_EVERY_S:
                consumer.commit(asynchronous=False)
                committed_at, is_owed = time.monotonic(), False
        if is_owed:
            consumer.commit(asynchronous=False)


DISTRICTS: Final = 60
#: One of this many parcels meets a busy carrier at the first attempt.
_BUSY_EVERY: Final = 25


@dataclass(frozen=True, slots=True)
class Parcel:
    order: str
    customer: str
    district: int


class CarrierBusy(Exception):
    """Goes away by itself, so a retry can succeed."""


class RoadClosed(Exception):
    """Remains until the road is opened, so a retry cannot succeed."""


class Roads:
    """One road is closed at a time. Usable from any thread: handlers check it while RoadRepair opens it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = 0

    def is_closed(self, district: int) -> bool:
        with self._lock:
            return district == self._closed

    def open(self) -> int:
        """Opens the closed road and closes the next one. Returns the district of the opened road."""
        with self._lock:
            opened, self._closed = self._closed, (self._closed + 1) % DISTRICTS
            return opened


def pack_order(value: bytes | None) -> Parcel | None:
    """None for a record that is not an order; the Spark pipeline makes those dead letters."""
    try:
        order = json.loads(value or b"")
        number, customer = str(order["id"]), str(order["customer"])
    except (ValueError, KeyError, TypeError):
        return None
    return Parcel(number, customer, crc32(number.encode()) % DISTRICTS)


def deliver(parcel: Parcel, *, attempt: int, roads: Roads) -> None:
    """Raises CarrierBusy, RoadClosed."""
    if roads.is_closed(parcel.district):
        raise RoadClosed(f"the road to district {parcel.district} is closed (order {parcel.order})")
    if attempt == 1 and crc32(b"carrier of " + parcel.order.encode()) % _BUSY_EVERY == 0:
        raise CarrierBusy(f"no carrier has time for order {parcel.order}")


_FIGURES_EVERY_S: Final = 0.2
#: After a crash, the next start gets the partitions within this time.
_CONSUMER_SETTINGS: Final = {"session.timeout.ms": 6_000}


class Shipping(Component):
    def __init__(self, access: BrokerAccess, roads: Roads) -> None:
        super().__init__(SHIPPING)
        self._access = access
        self._roads = roads
        #: Parcels that it has delivered since the demo started.
        self.handled = 0

    def work(self) -> None:
        from penstock.client import Backoff, Penstock

        settings = {**_CONSUMER_SETTINGS, **self._access.security}
        app = Penstock(self._access.bootstrap, name="demo-shipping", settings=settings)

        @app.subscribe(ORDERS, group=PACKING, delivery="exactly-once", to=PARCELS)
        def pack(message: Message) -> Parcel | None:
            return pack_order(message.value)

        @app.subscribe(PARCELS, group=SHIPPING, retry=Backoff(base="500ms", cap="5s", attempts=3))
        def ship(parcel: Parcel, message: Message) -> None:
            deliver(parcel, attempt=message.attempt, roads=self._roads)

        with app:
            app.start()
            before, figures = self.handled, app.figures()[ship.__qualname__]
            while not self.stopping.wait(_FIGURES_EVERY_S) and app.is_running:
                if before + figures.handled > self.handled:
                    self.handled, self.trouble = before + figures.handled, None
