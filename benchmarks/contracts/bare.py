"""Loops as people write them by hand on confluent-kafka, each with the commits of the contract beside it."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.contracts.messages import Order

_BATCH = 500
_WAIT_S = 0.5
_END_S = 30.0

#: What a loop does with the messages of a batch.
Touch = Callable[[list[Any]], None]


def handle(_: object) -> None:
    """Nothing, as the handlers of applications here."""


def untouched(batch: list[Any]) -> None:
    """The cost of the library alone: a real loop could not be written like this."""


def as_messages(batch: list[Any]) -> None:
    for message in batch:
        if message.error() is not None:
            raise RuntimeError(message.error().str())
        handle(message)


def as_bytes(batch: list[Any]) -> None:
    for message in batch:
        if message.error() is not None:
            raise RuntimeError(message.error().str())
        handle(message.value())


def as_orders() -> Touch:
    import msgspec

    decode = msgspec.json.Decoder(Order).decode

    def touch(batch: list[Any]) -> None:
        for message in batch:
            if message.error() is not None:
                raise RuntimeError(message.error().str())
            handle(decode(message.value()))

    return touch


class BareLoop:
    """In a thread of its own, as the loops of applications are."""

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        group: str,
        touch: Touch,
        *,
        commit_every_s: float,
        settings: Mapping[str, Any],
    ) -> None:
        self.count = 0
        self.thread = threading.Thread(target=self._run, name="bare", daemon=True)
        self._bootstrap = bootstrap
        self._topic = topic
        self._group = group
        self._touch = touch
        self._commit_every_s = commit_every_s
        self._settings = settings
        self._stopping = threading.Event()

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self.thread.join()

    def _run(self) -> None:
        from confluent_kafka import Consumer

        consumer = Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": self._group,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "earliest",
                **self._settings,
            }
        )
        consumer.subscribe([self._topic])
        self._loop(consumer)
        consumer.close()

    def _loop(self, consumer: Any) -> None:
        """At least once: handle, then commit, every tenth of a second."""
        committed_s = time.monotonic()
        while not self._stopping.is_set():
            batch = consumer.consume(_BATCH, _WAIT_S)
            self._touch(batch)
            self.count += len(batch)
            now_s = time.monotonic()
            if batch and now_s - committed_s >= self._commit_every_s:
                committed_s = now_s
                consumer.commit(offsets=_positions(consumer), asynchronous=True)
        consumer.commit(offsets=_positions(consumer), asynchronous=False)


class BareFirst(BareLoop):
    """At most once: commit and know it, then handle."""

    def _loop(self, consumer: Any) -> None:
        while not self._stopping.is_set():
            batch = consumer.consume(_BATCH, _WAIT_S)
            if batch:
                consumer.commit(offsets=_positions(consumer), asynchronous=False)
            self._touch(batch)
            self.count += len(batch)


class BareTransactions(BareLoop):
    """Exactly once: a batch is a transaction, with a copy of each message where there is a topic for them."""

    to: str | None = None

    def _loop(self, consumer: Any) -> None:
        producer = self._producer()
        while not self._stopping.is_set():
            batch = consumer.consume(_BATCH, _WAIT_S)
            if not batch:
                continue
            producer.begin_transaction()
            self._touch(batch)
            if self.to is not None:
                for message in batch:
                    producer.produce(self.to, message.value(), message.key())
            producer.send_offsets_to_transaction(
                _positions(consumer), consumer.consumer_group_metadata(), _END_S
            )
            producer.commit_transaction(_END_S)
            self.count += len(batch)

    def _producer(self) -> Any:
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self._bootstrap, "transactional.id": f"bare-{self._group}"})
        producer.init_transactions(_END_S)
        return producer


def _positions(consumer: Any) -> list[Any]:
    return [each for each in consumer.position(consumer.assignment()) if each.offset >= 0]
