"""Transactional ids as records of `__transaction_state`, and back.

They are read by schema and written by hand: every transaction writes three, and each of them would cost more than the
rest of its step.
"""

import struct
from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from kio.serial import entity_reader

from penstock.protocol.produce import encode_uvarint
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

_KEY: Final = struct.Struct(">hh")  # kind of record, bytes of the transactional id
_HEAD: Final = struct.Struct(">hqhib")  # version, producer id and epoch, timeout, state
_TIMES: Final = struct.Struct(">qq")  # last update, start
_LONG_TAG: Final = struct.Struct(">BBq")  # tag, size, value
_SHORT_TAG: Final = struct.Struct(">BBh")
_PREDECESSOR_EPOCH: Final = encode_uvarint(schemas.PREDECESSOR_EPOCH_TAG) + b"\x02"
_NO_TAGS: Final = b"\x00"
_NULL: Final = b"\x00"


class UnknownVersion(ValueError):
    """A value in a layout newer than any that this code knows: reading on would lose what it says."""


def can_store(transactional_id: str) -> bool:
    """Keys are stored with a length of 16 bits."""
    return len(transactional_id) > 0 and len(transactional_id.encode()) <= _STRING_BYTES_MAX


def encode(transaction: Transaction) -> KeyValue:
    producer, tags = transaction.producer, _tags(transaction)
    value = (
        _HEAD.pack(
            _VALUE_VERSION, producer.id, producer.epoch, transaction.timeout_ms, transaction.state.code
        ),
        _NULL if transaction.state is State.EMPTY else _partitions_out(transaction.partitions),
        _TIMES.pack(transaction.update_timestamp_ms, transaction.start_timestamp_ms),
        encode_uvarint(len(tags)),
        *tags,
    )
    return encode_key(transaction.transactional_id), b"".join(value)


def tombstone(transactional_id: str) -> KeyValue:
    return encode_key(transactional_id), None


def encode_key(transactional_id: str) -> bytes:
    name = transactional_id.encode()
    return _KEY.pack(TRANSACTION_LOG, len(name)) + name


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


def _tags(transaction: Transaction) -> list[bytes]:
    """The tagged fields, in the order of their tags; what has its default is left out."""
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


def _partitions_out(partitions: Iterable[TopicPartition]) -> bytes:
    topics = [
        _topic_out(topic.encode(), [place.partition for place in places])
        for topic, places in groupby(sorted(partitions), key=attrgetter("topic"))
    ]
    return encode_uvarint(len(topics) + 1) + b"".join(topics)


def _topic_out(name: bytes, partitions: list[int]) -> bytes:
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


def _partitions_in(entity: Any) -> frozenset[TopicPartition]:
    return frozenset(
        TopicPartition(topic.topic, partition)
        for topic in entity.transaction_partitions or ()
        for partition in topic.partition_ids
    )


def _read(schema: Any, data: bytes) -> Any:
    entity, _ = entity_reader(schema)(data, _INT16.size)
    return entity
