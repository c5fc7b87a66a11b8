"""Records of `__transaction_state`, in Kafka's published formats, declared on kio's serializers.

Keys start with an int16 that names the record type, values with an int16 version. Version 0 is only read: it has
neither the previous producer nor the protocol version of the client. Records are decoded by schema but encoded by
hand: every transaction writes three, and encoding by schema would cost more than the rest of the operation.
"""

import struct
from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from kio.static.primitive import i8, i16, i32, i64

from penstock.protocol.stored_records import (
    KeySchema,
    KeyValue,
    NestedSchema,
    RecordSchema,
    UnknownVersion,
    can_store,
    decode_entity,
    kafka_field,
    key_type,
    schema,
    value_version,
)
from penstock.protocol.wire import encode_uvarint
from penstock.transactions.messages import NO_PRODUCER_ID, TopicPartition
from penstock.transactions.transaction import (
    NO_PRODUCER,
    STATES_BY_CODE,
    ProducerIdAndEpoch,
    TransactionMetadata,
    TransactionState,
)

#: Our own tag, far above Kafka's. Without it, a producer that retries a request after a failover would be fenced.
PREDECESSOR_EPOCH_TAG: Final = 1_000


@schema()
class TransactionLogKey(KeySchema):
    transactional_id: str = kafka_field("string")


@schema(flexible=False)
class PartitionsV0(NestedSchema):
    topic: str = kafka_field("string")
    partition_ids: tuple[i32, ...] = kafka_field("int32")


@schema(flexible=False)
class TransactionLogValueV0(RecordSchema):
    producer_id: i64 = kafka_field("int64")
    producer_epoch: i16 = kafka_field("int16")
    transaction_timeout: i32 = kafka_field("int32")
    transaction_status: i8 = kafka_field("int8")
    transaction_partitions: tuple[PartitionsV0, ...] | None
    transaction_last_update_timestamp: i64 = kafka_field("int64")
    transaction_start_timestamp: i64 = kafka_field("int64")


@schema(version=1, flexible=True)
class PartitionsV1(PartitionsV0): ...


@schema(version=1, flexible=True)
class TransactionLogValueV1(TransactionLogValueV0):
    transaction_partitions: tuple[PartitionsV1, ...] | None
    previous_producer_id: i64 = kafka_field("int64", tag=0, default=i64(-1))
    next_producer_id: i64 = kafka_field("int64", tag=1, default=i64(-1))
    client_transaction_version: i16 = kafka_field("int16", tag=2, default=i16(0))
    next_producer_epoch: i16 = kafka_field("int16", tag=3, default=i16(-1))
    previous_producer_epoch: i16 = kafka_field("int16", tag=PREDECESSOR_EPOCH_TAG, default=i16(-1))


TRANSACTION_LOG_KEY_TYPE: Final = 0
#: The version that we write; version 0 is only read.
_VALUE_VERSION: Final = 1

_INT16: Final = struct.Struct(">h")
_VALUES: Final[dict[int, Any]] = {0: TransactionLogValueV0, 1: TransactionLogValueV1}

_KEY: Final = struct.Struct(">hh")  # record type, bytes of the transactional id
_HEAD: Final = struct.Struct(">hqhib")  # version, producer id and epoch, timeout, state
_TIMES: Final = struct.Struct(">qq")  # last update, start
_LONG_TAG: Final = struct.Struct(">BBq")  # tag, size, value
_SHORT_TAG: Final = struct.Struct(">BBh")
_PREDECESSOR_EPOCH: Final = encode_uvarint(PREDECESSOR_EPOCH_TAG) + b"\x02"
_NO_TAGS: Final = b"\x00"
_NULL: Final = b"\x00"


def is_valid_transactional_id(transactional_id: str) -> bool:
    """Whether the id is not empty and fits into a key."""
    return bool(transactional_id) and can_store(transactional_id)


def encode_transaction(transaction: TransactionMetadata) -> KeyValue:
    producer, tags = transaction.producer, _tags(transaction)
    value = (
        _HEAD.pack(
            _VALUE_VERSION, producer.id, producer.epoch, transaction.timeout_ms, transaction.state.code
        ),
        _NULL if transaction.state is TransactionState.EMPTY else _encode_partitions(transaction.partitions),
        _TIMES.pack(transaction.update_timestamp_ms, transaction.start_timestamp_ms),
        encode_uvarint(len(tags)),
        *tags,
    )
    return encode_key(transaction.transactional_id), b"".join(value)


def encode_tombstone(transactional_id: str) -> KeyValue:
    return encode_key(transactional_id), None


def encode_key(transactional_id: str) -> bytes:
    name = transactional_id.encode()
    return _KEY.pack(TRANSACTION_LOG_KEY_TYPE, len(name)) + name


def decode_key(key: bytes) -> str | None:
    """Returns None for a record of another type."""
    if key_type(key) != TRANSACTION_LOG_KEY_TYPE:
        return None
    transactional_id: str = decode_entity(TransactionLogKey, key).transactional_id
    return transactional_id


def decode_transaction(transactional_id: str, value: bytes) -> TransactionMetadata:
    version = value_version(value)
    if version not in _VALUES:
        raise UnknownVersion(f"transaction of version {version}")
    try:
        entity = decode_entity(_VALUES[version], value)
    except KeyError as error:  # kio raises this for a tag that the schema lacks
        raise UnknownVersion(str(error)) from error
    return TransactionMetadata(
        transactional_id=transactional_id,
        state=STATES_BY_CODE[entity.transaction_status],
        producer=ProducerIdAndEpoch(entity.producer_id, entity.producer_epoch),
        timeout_ms=entity.transaction_timeout,
        partitions=_decode_partitions(entity),
        start_timestamp_ms=entity.transaction_start_timestamp,
        update_timestamp_ms=entity.transaction_last_update_timestamp,
        **(_neighbouring_producers(entity) if version else {}),
    )


def _neighbouring_producers(entity: Any) -> dict[str, Any]:
    """Returns the predecessor, the successor and the protocol version, which version 0 does not contain."""
    successor = None
    if entity.next_producer_id != NO_PRODUCER_ID:
        # Kafka stores no epoch for a new producer id.
        successor = ProducerIdAndEpoch(entity.next_producer_id, max(entity.next_producer_epoch, 0))
    return {
        "successor": successor,
        "predecessor": ProducerIdAndEpoch(entity.previous_producer_id, entity.previous_producer_epoch),
        "transaction_version": entity.client_transaction_version,
    }


def _tags(transaction: TransactionMetadata) -> list[bytes]:
    """Returns the tagged fields in the order of their tags, without those that have the default value."""
    predecessor, successor = transaction.predecessor, transaction.successor or NO_PRODUCER
    tags = []
    if predecessor.id != NO_PRODUCER.id:
        tags.append(_LONG_TAG.pack(0, 8, predecessor.id))
    if successor.id != NO_PRODUCER.id:
        tags.append(_LONG_TAG.pack(1, 8, successor.id))
    if transaction.transaction_version:
        tags.append(_SHORT_TAG.pack(2, 2, transaction.transaction_version))
    if successor.epoch != NO_PRODUCER.epoch:
        tags.append(_SHORT_TAG.pack(3, 2, successor.epoch))
    if predecessor.epoch != NO_PRODUCER.epoch:
        tags.append(_PREDECESSOR_EPOCH + _INT16.pack(predecessor.epoch))
    return tags


def _encode_partitions(partitions: Iterable[TopicPartition]) -> bytes:
    topics = [
        _encode_topic(topic.encode(), [tp.partition for tp in tps])
        for topic, tps in groupby(sorted(partitions), key=attrgetter("topic"))
    ]
    return encode_uvarint(len(topics) + 1) + b"".join(topics)


def _encode_topic(name: bytes, partitions: list[int]) -> bytes:
    count = len(partitions)
    return b"".join(
        (
            encode_uvarint(len(name) + 1),
            name,
            encode_uvarint(count + 1),
            struct.pack(f">{count}i", *partitions),
            _NO_TAGS,
        )
    )


def _decode_partitions(entity: Any) -> frozenset[TopicPartition]:
    return frozenset(
        TopicPartition(topic.topic, partition)
        for topic in entity.transaction_partitions or ()
        for partition in topic.partition_ids
    )
