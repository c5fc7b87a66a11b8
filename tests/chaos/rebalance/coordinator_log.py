"""What the coordinator wrote about the group, record by record, from `__consumer_offsets`."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, TopicPartition
from tests.chaos.readers import CONSUMER
from tests.chaos.rebalance.host import GROUP, TOPIC
from tests.chaos.rebalance.judge import Owns, Stores

from penstock.groups import coordinator_records as offsets
from penstock.groups.consumer import consumer_group_records as groups
from penstock.protocol.stored_records import key_type

INTERNAL_TOPIC = "__consumer_offsets"
READ_S = 0.2
_END_OF_TEXT = "\0"  # which the client library adds


class KeyValue(NamedTuple):
    key: bytes
    value: bytes | None


def read(servers: str) -> list[KeyValue]:
    """All of the only partition that the topic has in these campaigns."""
    settings = {"bootstrap.servers": servers, "group.id": "reading", "enable.partition.eof": True}
    consumer = Consumer({**CONSUMER, **settings})
    consumer.assign([TopicPartition(INTERNAL_TOPIC, 0, 0)])
    found: list[KeyValue] = []
    try:
        while True:
            for message in consumer.consume(1000, READ_S):
                error = message.error()
                if error is None:
                    found.append(KeyValue(message.key() or b"", message.value()))
                elif error.code() == KafkaError._PARTITION_EOF:
                    return found
    finally:
        consumer.close()


def events(rows: Iterable[KeyValue]) -> Iterator[Owns | Stores]:
    for row in rows:
        kind = key_type(row.key)
        if kind == groups.ConsumerGroupRecordType.CURRENT_MEMBER_ASSIGNMENT:
            current = groups.CONSUMER_GROUP_CODEC.decode(*row)
            if current.group_id == GROUP:
                owned = () if current.value is None else current.value.owned()
                yield Owns(current.name, frozenset(partition for _, partition in owned))
        elif kind == offsets.OFFSET_COMMIT:
            stored = offsets.decode_record(*row)
            assert isinstance(stored, offsets.OffsetCommitRecord)
            if (stored.group, stored.topic) == (GROUP, TOPIC) and stored.value is not None:
                yield Stores(
                    stored.value.metadata.rstrip(_END_OF_TEXT), stored.partition, stored.value.offset
                )


def rebalances(rows: Iterable[KeyValue]) -> int:
    """How many epochs the group has had."""
    epochs = set()
    for row in rows:
        if key_type(row.key) == groups.ConsumerGroupRecordType.GROUP_METADATA:
            record = groups.CONSUMER_GROUP_CODEC.decode(*row)
            if record.group_id == GROUP and record.value is not None:
                epochs.add(record.value.epoch)
    return len(epochs)
