"""The plain subscriber: any Kafka client will do. It reads orders as a group and commits what it has done."""

from __future__ import annotations

import time
from typing import Any, Final

from penstock.demo.names import BILLING, ORDERS
from penstock.demo.parts import Part, client_settings

_POLL_S: Final = 0.2
_RECORDS_MAX: Final = 500
_COMMIT_EVERY_S: Final = 0.25


class Billing(Part):
    def __init__(self, bootstrap: str) -> None:
        super().__init__(BILLING)
        self._bootstrap = bootstrap
        #: Orders that it has read since it was started.
        self.read = 0

    def work(self) -> None:
        from confluent_kafka import Consumer

        settings = {
            **client_settings(self._bootstrap, self.name),
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
