"""Counts what is in the topics by reading them, as any subscriber could, and keeps what the view shows of it."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Final

from penstock.demo.names import LETTERS, PARCEL_LETTERS, REVENUE, TOPICS, retries_of
from penstock.demo.parts import Part, client_settings
from penstock.protocol.letters import ERROR_CLASS, MESSAGE, OFFSET, PARTITION, TOPIC

_POLL_S: Final = 0.2
_RECORDS_MAX: Final = 5_000
#: How often to look for topics that others have made meanwhile.
_LOOK_EVERY_S: Final = 2.0
_METADATA_S: Final = 5.0
_SALES_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """Why a dead letter is one, and which record it was."""

    error: str
    message: str
    origin: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sale:
    """What a product has brought in within a window of time, as the pipeline has it."""

    window: str
    product: str
    orders: int
    total: float


class Tally(Part):
    def __init__(self, bootstrap: str) -> None:
        super().__init__("tally")
        self._bootstrap = bootstrap
        #: By topic, in all; retry topics too.
        self.records: Counter[str] = Counter()
        #: Dead letters by the class of their errors.
        self.errors: Counter[str] = Counter()
        self.latest_letter: Letter | None = None
        self.sales: deque[Sale] = deque(maxlen=_SALES_MAX)
        #: It has seen what was there when it began; before that its pace is not that of the demo.
        self.is_current = False
        self._ends: dict[tuple[str, int], int] = {}

    def work(self) -> None:
        from confluent_kafka import Consumer

        settings = {
            **client_settings(self._bootstrap, self.name),
            "group.id": "demo-tally",  # the library wants one; nothing is committed
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "topic.metadata.refresh.interval.ms": 2_000,
        }
        self._forget()
        consumer = Consumer(settings)
        try:
            self._count(consumer)
        finally:
            consumer.close()

    def _forget(self) -> None:
        """Each life counts from the beginning of the topics."""
        self.records.clear()
        self.errors.clear()
        self.is_current = False
        self._ends.clear()

    def _count(self, consumer: Any) -> None:
        looked_at = 0.0
        while not self.stopping.is_set():
            if time.monotonic() - looked_at >= _LOOK_EVERY_S:
                looked_at = time.monotonic()
                self._find_topics(consumer)
            if not self._ends:
                self.stopping.wait(_POLL_S)
                continue
            for message in consumer.consume(_RECORDS_MAX, _POLL_S):
                self._take(message)

    def _find_topics(self, consumer: Any) -> None:
        from confluent_kafka import OFFSET_BEGINNING, TopicPartition

        topics = consumer.list_topics(timeout=_METADATA_S).topics
        found = {
            (name, partition)
            for name, topic in topics.items()
            if name in TOPICS or retries_of(name)
            for partition in topic.partitions
        }
        new = sorted(found - self._ends.keys())
        if new:
            self._ends |= dict.fromkeys(new, -1)
            consumer.incremental_assign([TopicPartition(*place, OFFSET_BEGINNING) for place in new])

    def _take(self, message: Any) -> None:
        from confluent_kafka import KafkaError, KafkaException

        error = message.error()
        if error is None:
            self.trouble = None
            self._learn(message)
        elif error.code() == KafkaError._PARTITION_EOF:
            self._ends[message.topic(), message.partition()] = message.offset()
            self.is_current = self.is_current or min(self._ends.values()) >= 0
        else:
            raise KafkaException(error)

    def _learn(self, message: Any) -> None:
        topic = message.topic()
        self.records[topic] += 1
        if topic in (LETTERS, PARCEL_LETTERS):
            letter = _letter(message)
            self.errors[letter.error] += 1
            self.latest_letter = letter
        elif topic == REVENUE:
            self.sales.append(_sale(message))


def _letter(message: Any) -> Letter:
    headers = {name: (value or b"").decode(errors="replace") for name, value in message.headers() or ()}
    return Letter(
        error=headers.get(ERROR_CLASS, "").rpartition(".")[2],
        message=headers.get(MESSAGE, ""),
        origin=f"{headers.get(TOPIC, '?')}[{headers.get(PARTITION, '?')}] @ {headers.get(OFFSET, '?')}",
        value=(message.value() or b"").decode(errors="replace"),
    )


def _sale(message: Any) -> Sale:
    found = json.loads(message.value())
    return Sale(
        window=found["window"], product=found["product"], orders=found["orders"], total=found["total"]
    )
