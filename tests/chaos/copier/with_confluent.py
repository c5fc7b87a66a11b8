"""A copier on confluent-kafka (librdkafka), whose positions are fenced by the generation of its group (KIP-447)."""

import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from tests.chaos.copier.worker import GROUP, SOURCE, TARGET, Item, Job, MustAbort, next_offsets, target_of
from tests.chaos.readers import CONSUMER
from tests.chaos.workload import CLIENT

PATIENCE_S = 60.0
CALL_S = 5.0
WAIT_S = 0.2


class ConfluentCopier:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._metadata: Any = None
        self._is_moved = False  # a rebalance has come in between
        self._producer = Producer(_producer_settings(job))
        _insist(lambda: self._producer.init_transactions(CALL_S))
        self._consumer = Consumer(_consumer_settings(job))
        self._consumer.subscribe(
            [SOURCE], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )

    def _assigned(self, consumer: Consumer, _: list[TopicPartition]) -> None:
        """What is read under this assignment is committed under its generation, or not at all."""
        self._metadata = consumer.consumer_group_metadata()

    def _revoked(self, _: Consumer, __: list[TopicPartition]) -> None:
        self._is_moved = True
        self._metadata = None

    def poll(self) -> list[Item]:
        self._is_moved = False
        items = [
            _item(message)
            for message in self._consumer.consume(self._job.batch, WAIT_S)
            if message.error() is None
        ]
        if self._is_moved and items:
            self.rewind()  # some of it may be another copier's by now
            return []
        if self._job.protocol == "consumer":  # epochs of members change without a word to the application
            self._metadata = self._consumer.consumer_group_metadata()
        return items

    def copy(self, items: list[Item]) -> None:
        if self._metadata is None:
            raise MustAbort("not assigned")
        try:
            self._producer.begin_transaction()
            for item in items:
                self._produce(item)
            offsets = [TopicPartition(SOURCE, *place) for place in next_offsets(items).items()]
            _insist(lambda: self._producer.send_offsets_to_transaction(offsets, self._metadata, CALL_S))
            _insist(lambda: self._producer.commit_transaction(CALL_S))
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
            raise MustAbort(error.args[0].name()) from error

    def _produce(self, item: Item) -> None:
        while True:
            try:
                self._producer.produce(TARGET, item.value, item.key, target_of(item.key))
                break
            except BufferError:
                self._producer.poll(0.1)

    def abort(self) -> None:
        _insist(lambda: self._producer.abort_transaction(CALL_S))

    def rewind(self) -> None:
        assigned = self._consumer.assignment()
        if not assigned:
            return
        found = _insist(lambda: _committed(self._consumer, assigned))
        places = [TopicPartition(SOURCE, place.partition, max(place.offset, 0)) for place in found]
        if self._job.protocol == "consumer":
            self._consumer.incremental_unassign(assigned)
            self._consumer.incremental_assign(places)
        else:
            self._consumer.assign(places)

    def close(self) -> None:
        self._consumer.close()


def _committed(consumer: Consumer, assigned: list[TopicPartition]) -> list[TopicPartition]:
    found: list[TopicPartition] = consumer.committed(assigned, timeout=CALL_S)
    for place in found:
        if place.error is not None:
            raise KafkaException(place.error)
    return found


def _insist(call: Callable[[], Any]) -> Any:
    """As librdkafka asks for it: again while the error says so."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except KafkaException as error:
            again = error.args[0].retriable() or error.args[0].code() == KafkaError._TIMED_OUT
            if not again or time.monotonic() > deadline:
                raise


def _item(message: Any) -> Item:
    return Item(message.partition(), message.offset(), message.key(), message.value())


def _producer_settings(job: Job) -> dict[str, Any]:
    return {
        **CLIENT,
        "bootstrap.servers": job.servers,
        "linger.ms": 2,
        "request.timeout.ms": 2000,
        "transaction.timeout.ms": job.transaction_timeout_ms,
        "transactional.id": job.transactional_id,
    }


def _consumer_settings(job: Job) -> dict[str, Any]:
    classic = {
        "heartbeat.interval.ms": job.session_timeout_ms // 8,
        "partition.assignment.strategy": "range",
        "session.timeout.ms": job.session_timeout_ms,
    }
    return {
        **CONSUMER,
        **(classic if job.protocol == "classic" else {}),
        **({} if job.instance_id is None else {"group.instance.id": job.instance_id}),
        "bootstrap.servers": job.servers,
        "group.id": GROUP,
        "group.protocol": job.protocol,
    }


def connect(job: Job) -> ConfluentCopier:
    return ConfluentCopier(job)
