"""Transactional ids as records of `__transaction_state`, and back."""

import struct
from io import BytesIO
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from kio.serial import entity_reader, entity_writer

from penstock.transactions import schemas
from penstock.transactions.messages import NO_PRODUCER_ID, TopicPartition
from penstock.transactions.states import BY_CODE, State
from penstock.transactions.transaction import NO_PRODUCER, Producer, Transaction
from penstock.transactions.work import KeyValue

TRANSACTION_LOG: Final = 0
#: The version we write; see schemas.py.
_VALUE_VERSION: Final = 1

_STRING_BYTES_MAX: Final = 32_767
_INT16: Final = struct.Struct(">h")
_VALUES: Final[dict[int, Any]] = {0: schemas.TransactionLogValueV0, 1: schemas.TransactionLogValueV1}

_write_key: Final = entity_writer(schemas.TransactionLogKey)
_write_value: Final = entity_writer(schemas.TransactionLogValueV1)


class UnknownVersion(ValueError):
    """A value in a layout newer than any that this code knows: reading on would lose what it says."""


def can_store(transactional_id: str) -> bool:
    """Keys are stored with a length of 16 bits."""
    return len(transactional_id) > 0 and len(transactional_id.encode()) <= _STRING_BYTES_MAX


def encode(transaction: Transaction) -> KeyValue:
    successor = transaction.successor or NO_PRODUCER
    value = schemas.TransactionLogValueV1(
        producer_id=transaction.producer.id,
        producer_epoch=transaction.producer.epoch,
        transaction_timeout=transaction.timeout_ms,
        transaction_status=transaction.state.code,
        transaction_partitions=_partitions_out(transaction),
        transaction_last_update_timestamp=transaction.update_timestamp_ms,
        transaction_start_timestamp=transaction.start_timestamp_ms,
        previous_producer_id=transaction.predecessor.id,
        previous_producer_epoch=transaction.predecessor.epoch,
        next_producer_id=successor.id,
        next_producer_epoch=successor.epoch,
        client_transaction_version=transaction.transaction_version,
    )
    buffer = BytesIO()
    buffer.write(_INT16.pack(_VALUE_VERSION))
    _write_value(buffer, value)
    return encode_key(transaction.transactional_id), buffer.getvalue()


def tombstone(transactional_id: str) -> KeyValue:
    return encode_key(transactional_id), None


def encode_key(transactional_id: str) -> bytes:
    buffer = BytesIO()
    buffer.write(_INT16.pack(TRANSACTION_LOG))
    _write_key(buffer, schemas.TransactionLogKey(transactional_id=transactional_id))
    return buffer.getvalue()


def decode_key(key: bytes) -> str | None:
    """None for a record of another kind."""
    (kind,) = _INT16.unpack_from(key)
    if kind != TRANSACTION_LOG:
        return None
    transactional_id: str = _read(schemas.TransactionLogKey, key).transactional_id
    return transactional_id


def decode_value(transactional_id: str, value: bytes) -> Transaction:
    (version,) = _INT16.unpack_from(value)
    if version not in _VALUES:
        raise UnknownVersion(f"transaction of version {version}")
    try:
        entity = _read(_VALUES[version], value)
    except KeyError as error:  # kio's word for a tag that the schema lacks
        raise UnknownVersion(str(error)) from error
    return Transaction(
        transactional_id=transactional_id,
        state=BY_CODE[entity.transaction_status],
        producer=Producer(entity.producer_id, entity.producer_epoch),
        timeout_ms=entity.transaction_timeout,
        partitions=_partitions_in(entity),
        start_timestamp_ms=entity.transaction_start_timestamp,
        update_timestamp_ms=entity.transaction_last_update_timestamp,
        **(_kin(entity) if version else {}),
    )


def _kin(entity: Any) -> dict[str, Any]:
    """Who came before and who comes after, which only newer values tell."""
    successor = None
    if entity.next_producer_id != NO_PRODUCER_ID:
        # Kafka stores no epoch for a producer id that was just made.
        successor = Producer(entity.next_producer_id, max(entity.next_producer_epoch, 0))
    return {
        "successor": successor,
        "predecessor": Producer(entity.previous_producer_id, entity.previous_producer_epoch),
        "transaction_version": entity.client_transaction_version,
    }


def _partitions_out(transaction: Transaction) -> tuple[schemas.PartitionsV1, ...] | None:
    if transaction.state is State.EMPTY:
        return None
    by_topic = groupby(sorted(transaction.partitions), key=attrgetter("topic"))
    return tuple(
        schemas.PartitionsV1(topic=topic, partition_ids=tuple(place.partition for place in places))
        for topic, places in by_topic
    )


def _partitions_in(entity: Any) -> frozenset[TopicPartition]:
    return frozenset(
        TopicPartition(topic.topic, partition)
        for topic in entity.transaction_partitions or ()
        for partition in topic.partition_ids
    )


def _read(schema: Any, data: bytes) -> Any:
    entity, _ = entity_reader(schema)(data, _INT16.size)
    return entity
