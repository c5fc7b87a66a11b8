"""What the demo shows at one moment, as values, and the components that measure it. The view draws only this.

Records are counted by reading the topics, as any subscriber could. The lag of groups comes from the broker. Rates are
averages over the last seconds; a line of bars shows how they developed. The event log holds what happened, with the
time; each problem is reported when it appears and when it is gone.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from penstock.client.wire.cluster import Cluster
from penstock.demo.access import BrokerAccess
from penstock.demo.component import Component
from penstock.demo.names import DEAD_LETTERS, PARCEL_DEAD_LETTERS, REVENUE, TOPICS, retried_topic
from penstock.protocol.dead_letter_headers import (
    ERROR_CLASS_HEADER,
    ERROR_MESSAGE_HEADER,
    OFFSET_HEADER,
    PARTITION_HEADER,
    TOPIC_HEADER,
)
from penstock.spark.pipelines.status import group_lag

_POLL_S: Final = 0.2
_RECORDS_MAX: Final = 5_000
#: How often to look for new topics, which others may create.
_TOPICS_EVERY_S: Final = 2.0
_METADATA_S: Final = 5.0
_SALES_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestDeadLetter:
    """The error of a dead letter, and its original record."""

    error: str
    message: str
    origin: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sale:
    """The revenue of a product within a time window, as the pipeline has computed it."""

    window: str
    product: str
    orders: int
    total: float


class TopicCounter(Component):
    def __init__(self, access: BrokerAccess) -> None:
        super().__init__("tally")
        self._access = access
        #: The number of records by topic, including retry topics.
        self.records: Counter[str] = Counter()
        #: Dead letters by the class of their errors.
        self.errors: Counter[str] = Counter()
        self.latest_dead_letter: LatestDeadLetter | None = None
        self.sales: deque[Sale] = deque(maxlen=_SALES_MAX)
        #: It has read all records that existed when it started; until then, its rate is not that of the demo.
        self.is_current = False
        self._ends: dict[tuple[str, int], int] = {}

    def work(self) -> None:
        from confluent_kafka import Consumer

        settings = {
            **self._access.librdkafka(self.name),
            "group.id": "demo-tally",  # the library requires one; nothing is committed
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
        """Resets the counts: each call of `work` reads the topics from the beginning."""
        self.records.clear()
        self.errors.clear()
        self.is_current = False
        self._ends.clear()

    def _count(self, consumer: Any) -> None:
        looked_at = 0.0
        while not self.stopping.is_set():
            if time.monotonic() - looked_at >= _TOPICS_EVERY_S:
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
            if name in TOPICS or retried_topic(name)
            for partition in topic.partitions
        }
        new = sorted(found - self._ends.keys())
        if new:
            self._ends |= dict.fromkeys(new, -1)
            consumer.incremental_assign([TopicPartition(*tp, OFFSET_BEGINNING) for tp in new])

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
        if topic in (DEAD_LETTERS, PARCEL_DEAD_LETTERS):
            letter = _parse_dead_letter(message)
            self.errors[letter.error] += 1
            self.latest_dead_letter = letter
        elif topic == REVENUE:
            self.sales.append(_parse_sale(message))


def _parse_dead_letter(message: Any) -> LatestDeadLetter:
    headers = {name: (value or b"").decode(errors="replace") for name, value in message.headers() or ()}
    return LatestDeadLetter(
        error=headers.get(ERROR_CLASS_HEADER, "").rpartition(".")[2],
        message=headers.get(ERROR_MESSAGE_HEADER, ""),
        origin=f"{headers.get(TOPIC_HEADER, '?')}[{headers.get(PARTITION_HEADER, '?')}] "
        f"@ {headers.get(OFFSET_HEADER, '?')}",
        value=(message.value() or b"").decode(errors="replace"),
    )


def _parse_sale(message: Any) -> Sale:
    found = json.loads(message.value())
    return Sale(
        window=found["window"], product=found["product"], orders=found["orders"], total=found["total"]
    )


_LAG_EVERY_S: Final = 1.0
#: The longest that a request for a lag may take.
_LAG_TIMEOUT_MS: Final = "5000"


class GroupLags(Component):
    def __init__(self, access: BrokerAccess, groups: Sequence[str]) -> None:
        super().__init__("lags")
        self._settings = access.settings(default_api_timeout_ms=_LAG_TIMEOUT_MS)
        self._groups = tuple(groups)
        #: The lag by group; None while the group has no committed offsets.
        self.records: dict[str, int | None] = dict.fromkeys(groups)

    def work(self) -> None:
        with Cluster(self._settings) as cluster:
            while not self.stopping.wait(_LAG_EVERY_S):
                for group in self._groups:
                    self.records[group] = group_lag(cluster, group)
                self.trouble = None


#: Long enough that the rate does not jump with each batch of Spark, which come every few seconds.
RATE_WINDOW_S: Final = 10.0
STEP_S: Final = 3.0
STEPS: Final = 8


class RateMeter:
    """Computes rates from totals; `feed` it a total and the time whenever there is a new one."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=STEPS + 1)
        self._recent: deque[tuple[float, int]] = deque()

    def feed(self, total: int, now_s: float) -> None:
        if self._recent and total < self._recent[-1][1]:  # the counter was reset
            self._recent.clear()
            self._steps.clear()
        self._recent.append((now_s, total))
        while len(self._recent) > 2 and self._recent[1][0] <= now_s - RATE_WINDOW_S:
            self._recent.popleft()
        if not self._steps or now_s - self._steps[-1][0] >= STEP_S:
            self._steps.append((now_s, total))

    @property
    def per_s(self) -> float | None:
        """None until there are two readings."""
        if len(self._recent) < 2:
            return None
        (then, before), (now, after) = self._recent[0], self._recent[-1]
        return (after - before) / (now - then) if now > then else None

    @property
    def history(self) -> tuple[float, ...]:
        """The rate per second in each step, the latest last."""
        steps = list(self._steps)
        return tuple(
            (after - before) / (now - then)
            for (then, before), (now, after) in itertools.pairwise(steps)
            if now > then
        )


class FlowKind(Enum):
    SHOP = "shop"
    TOPIC = "topic"
    SUBSCRIBER = "subscriber"
    SPARK = "spark"
    TABLE = "table"
    TROUBLE = "trouble"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A line of the tree: something that records flow into, shown below its source."""

    name: str
    #: For each level of the tree: whether this line, or its ancestor at that level, is the last of its siblings.
    last: tuple[bool, ...]
    kind: FlowKind
    note: str
    per_s: float | None = None
    history: tuple[float, ...] = ()
    total: int | None = None
    #: None for lines that are not readers.
    lag: int | None = None
    trouble: str | None = None


class Health(Enum):
    ABSENT = "absent"
    STARTING = "starting"
    UP = "up"
    TROUBLED = "troubled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    at_s: float
    text: str
    is_trouble: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    now_s: float  # since the start
    address: str
    data: str
    broker: Health
    spark: Health
    #: The state of Spark in a few words.
    spark_note: str
    flows: tuple[Flow, ...]
    sales: tuple[Sale, ...]
    latest_dead_letter: LatestDeadLetter | None
    dead_letters: int
    replayed: int
    duplicates_dropped: int
    events: tuple[Event, ...]


_EVENTS_KEPT: Final = 100


class EventLog:
    """The events that all components report, with their time."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=_EVENTS_KEPT)
        self._troubles: dict[str, str | None] = {}
        self._count = 0

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began

    def add(self, text: str, *, is_trouble: bool = False) -> None:
        with self._lock:
            self._events.append(Event(at_s=self.now_s, text=text, is_trouble=is_trouble))
            self._count += 1

    def watch(self, parts: Iterable[Component]) -> None:
        """Reports the components whose trouble has changed since the last call."""
        for part in parts:
            trouble = part.trouble
            if trouble != self._troubles.get(part.name):
                self._troubles[part.name] = trouble
                if trouble is not None:
                    self.add(f"{part.name}: {trouble}", is_trouble=True)
                else:
                    self.add(f"{part.name} works again")

    @property
    def events(self) -> tuple[Event, ...]:
        with self._lock:
            return tuple(self._events)

    def since(self, seen: int) -> tuple[int, tuple[Event, ...]]:
        """The number of events so far, and the kept ones after the first `seen`."""
        with self._lock:
            new = self._count - seen
            return self._count, tuple(self._events)[-new:] if new else ()
