"""Requests to transaction coordinators: one function for each request, each of which retries until its deadline."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from penstock.client.errors import Unavailable, UnsupportedVersion, parse_error_code, raise_for_error
from penstock.client.wire.cluster import Cluster, CoordinatorType
from penstock.client.wire.connection import Connection
from penstock.client.wire.in_flight import NO_PRODUCER, NO_PRODUCER_ID, ProducerIdAndEpoch
from penstock.client.wire.metadata import TopicPartition, by_topic
from penstock.client.wire.offsets import CommittedOffset, offset_topics
from penstock.protocol.errors import ErrorCode, MalformedFrame
from penstock.protocol.schemas import schema_class
from penstock.protocol.wire import encode_uvarint, read_uvarint

#: From this feature level on, every transaction has its own epoch, and leaders add partitions (KIP-890).
EPOCH_PER_TRANSACTION: Final = 2
TRANSACTION_VERSION_FEATURE: Final = "transaction.version"

_INIT_PRODUCER_ID: Final = 22
_TWO_PHASE_VERSION: Final = 6
_PRODUCE: Final = 0
_PRODUCE_ADDS_PARTITIONS_VERSION: Final = 12
_END_TXN: Final = 26
_END_TXN_BUMPS_EPOCH_VERSION: Final = 5
#: The next producer of the transactional id sets its own timeout.
_FENCE_TIMEOUT_MS: Final = 60_000
#: An empty transaction has no start time, and cannot be described.
_EMPTY_STATE: Final = "Empty"
_OPEN_STATES: Final = ("Ongoing", "PrepareCommit", "PrepareAbort")

_DESCRIBE_TRANSACTIONS: Final = 65
#: Behind the throttle time and the number of states.
_FIRST_STATE_OFFSET: Final = 5
_ERROR_CODE: Final = struct.Struct(">h")
#: Timeout and start.
_TIMEOUT_AND_START_BYTES: Final = 12
_PRODUCER_ID_AND_EPOCH: Final = struct.Struct(">qh")


@dataclass(frozen=True, slots=True, kw_only=True)
class InitProducerIdResult:
    producer: ProducerIdAndEpoch
    #: The producer whose open transaction was kept for this one to end; None if there is none.
    ongoing: ProducerIdAndEpoch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionInfo:
    transactional_id: str
    state: str
    producer: ProducerIdAndEpoch
    timeout_ms: int
    start_ms: int
    partitions: tuple[TopicPartition, ...]


def transaction_version(connection: Connection, at_most: int = EPOCH_PER_TRANSACTION) -> int:
    """Returns the newest transaction version that the cluster, this broker and the client support."""
    knows = connection.knows(_END_TXN, _END_TXN_BUMPS_EPOCH_VERSION) and connection.knows(
        _PRODUCE, _PRODUCE_ADDS_PARTITIONS_VERSION
    )
    level = connection.features().get(TRANSACTION_VERSION_FEATURE, 0) if knows else 0
    return min(level, at_most) if level >= EPOCH_PER_TRANSACTION else 0


def init_producer(cluster: Cluster) -> InitProducerIdResult:
    """Gets an id for a producer without transactions. Raises Unavailable, Refused."""
    request = _init_request(None, 1, NO_PRODUCER)
    return cluster.call_any(lambda connection: _init_result(connection.call(request), "a producer"))


def init_transactional(
    cluster: Cluster,
    transactional_id: str,
    *,
    timeout_ms: int,
    current: ProducerIdAndEpoch = NO_PRODUCER,
    two_phase: bool = False,
    keep_prepared: bool = False,
) -> InitProducerIdResult:
    """Takes over a transactional id: fences its producer, and aborts its transaction unless `keep_prepared` is set.

    `current` is for a producer that continues after a failure. Raises Fenced, Refused, Unavailable, and
    UnsupportedVersion if the broker does not support two-phase commit.
    """
    request = _init_request(transactional_id, timeout_ms, current, two_phase, keep_prepared)

    def call(connection: Connection) -> InitProducerIdResult:
        if (two_phase or keep_prepared) and not connection.knows(_INIT_PRODUCER_ID, _TWO_PHASE_VERSION):
            raise UnsupportedVersion(f"{connection.peer} does not support two-phase commit")
        return _init_result(connection.call(request), f"transactional id {transactional_id}")

    return cluster.call_coordinator(CoordinatorType.TRANSACTION, transactional_id, call)


def _init_request(
    transactional_id: str | None,
    timeout_ms: int,
    current: ProducerIdAndEpoch,
    two_phase: bool = False,
    keep_prepared: bool = False,
) -> Any:
    return schema_class("init_producer_id.v6.request:InitProducerIdRequest")(
        transactional_id=transactional_id,
        transaction_timeout=timedelta(milliseconds=timeout_ms),
        producer_id=current.id,
        producer_epoch=current.epoch,
        enable2_pc=two_phase,
        keep_prepared_txn=keep_prepared,
    )


def _init_result(response: Any, subject: str) -> InitProducerIdResult:
    raise_for_error(response.error_code, subject)
    ongoing = ProducerIdAndEpoch(
        int(getattr(response, "ongoing_txn_producer_id", NO_PRODUCER.id)),
        int(getattr(response, "ongoing_txn_producer_epoch", NO_PRODUCER.epoch)),
    )
    return InitProducerIdResult(
        producer=ProducerIdAndEpoch(int(response.producer_id), int(response.producer_epoch)),
        ongoing=None if ongoing.id == NO_PRODUCER_ID else ongoing,
    )


def add_partitions(
    cluster: Cluster,
    transactional_id: str,
    producer: ProducerIdAndEpoch,
    topic_partitions: Iterable[TopicPartition],
) -> None:
    """Adds partitions to the transaction, in the older protocol. Raises Fenced, Refused, Unavailable."""
    module = "add_partitions_to_txn.v3.request"
    topic = schema_class(f"{module}:AddPartitionsToTxnTopic")
    request = schema_class(f"{module}:AddPartitionsToTxnRequest")(
        v3_and_below_transactional_id=transactional_id,
        v3_and_below_producer_id=producer.id,
        v3_and_below_producer_epoch=producer.epoch,
        v3_and_below_topics=tuple(
            topic(name=name, partitions=tuple(index for index, _ in parts))
            for name, parts in by_topic(
                (topic_partition, None) for topic_partition in topic_partitions
            ).items()
        ),
    )

    def call(connection: Connection) -> None:
        for reply in connection.call(request).results_by_topic_v3_and_below:
            for each in reply.results_by_partition:
                if each.partition_error_code is not ErrorCode.operation_not_attempted:
                    raise_for_error(each.partition_error_code, f"{reply.name}[{each.partition_index}]")

    cluster.call_coordinator(CoordinatorType.TRANSACTION, transactional_id, call)


def commit_offsets(
    cluster: Cluster,
    transactional_id: str,
    producer: ProducerIdAndEpoch,
    group: str,
    offsets: Mapping[TopicPartition, int | CommittedOffset],
    *,
    version: int,
    generation: int = -1,
    member: str = "",
) -> None:
    """Adds a group's offsets to the transaction. Raises Fenced, Refused, Unavailable."""
    number = 5 if version >= EPOCH_PER_TRANSACTION else 4
    module = f"txn_offset_commit.v{number}.request"
    request = schema_class(f"{module}:TxnOffsetCommitRequest")(
        transactional_id=transactional_id,
        group_id=group,
        producer_id=producer.id,
        producer_epoch=producer.epoch,
        generation_id=generation,
        member_id=member,
        group_instance_id=None,
        topics=offset_topics(module, "TxnOffsetCommitRequest", offsets, ""),
    )

    def call(connection: Connection) -> None:
        for topic in connection.call(request).topics:
            for each in topic.partitions:
                raise_for_error(
                    each.error_code, f"offset of group {group} in {topic.name}[{each.partition_index}]"
                )

    cluster.call_coordinator(CoordinatorType.GROUP, group, call)


def add_offsets(cluster: Cluster, transactional_id: str, producer: ProducerIdAndEpoch, group: str) -> None:
    """Adds a group to the transaction, in the older protocol. Raises Fenced, Refused, Unavailable."""
    request = schema_class("add_offsets_to_txn.v3.request:AddOffsetsToTxnRequest")(
        transactional_id=transactional_id,
        producer_id=producer.id,
        producer_epoch=producer.epoch,
        group_id=group,
    )

    def call(connection: Connection) -> None:
        raise_for_error(connection.call(request).error_code, f"group {group}")

    cluster.call_coordinator(CoordinatorType.TRANSACTION, transactional_id, call)


def end_transaction(
    cluster: Cluster, transactional_id: str, producer: ProducerIdAndEpoch, *, commit: bool, version: int
) -> ProducerIdAndEpoch:
    """Ends the transaction, and returns the producer id and epoch of the next one. May be repeated.

    Raises Fenced, Unavailable (the outcome is then unknown), Refused (INVALID_TXN_STATE if it ended the other way).
    """
    number = (
        _END_TXN_BUMPS_EPOCH_VERSION if version >= EPOCH_PER_TRANSACTION else _END_TXN_BUMPS_EPOCH_VERSION - 1
    )
    request = schema_class(f"end_txn.v{number}.request:EndTxnRequest")(
        transactional_id=transactional_id,
        producer_id=producer.id,
        producer_epoch=producer.epoch,
        committed=commit,
    )

    def call(connection: Connection) -> ProducerIdAndEpoch:
        response = connection.call(request)
        raise_for_error(response.error_code, f"the {'commit' if commit else 'abort'} of {transactional_id}")
        following = ProducerIdAndEpoch(
            int(getattr(response, "producer_id", NO_PRODUCER.id)),
            int(getattr(response, "producer_epoch", NO_PRODUCER.epoch)),
        )
        return producer if following.id == NO_PRODUCER_ID else following

    return cluster.call_coordinator(CoordinatorType.TRANSACTION, transactional_id, call)


def fence_producer(cluster: Cluster, transactional_id: str) -> None:
    """Aborts the open transaction of this id, prepared or not, and fences its producer. Raises Refused, Unavailable."""
    init_transactional(cluster, transactional_id, timeout_ms=_FENCE_TIMEOUT_MS)


# Describing


def describe_transaction(cluster: Cluster, transactional_id: str) -> TransactionInfo | None:
    """Returns None if the id is unknown or had no transaction yet. Raises Refused, Unavailable."""
    request = schema_class("describe_transactions.v0.request:DescribeTransactionsRequest")(
        transactional_ids=(transactional_id,)
    )

    def call(connection: Connection) -> TransactionInfo | None:
        listed = {each.transactional_id: each for each in _list_on_node(connection)}
        if transactional_id not in listed or listed[transactional_id].transaction_state == _EMPTY_STATE:
            return None
        (reply,) = connection.call(request).transaction_states
        if reply.error_code is ErrorCode.transactional_id_not_found:
            return None
        raise_for_error(reply.error_code, f"transactional id {transactional_id}")
        return _transaction_info(reply)

    return cluster.call_coordinator(CoordinatorType.TRANSACTION, transactional_id, call)


def list_transactions(cluster: Cluster, prefix: str = "", states: tuple[str, ...] = ()) -> dict[str, str]:
    """Returns the states of all transactional ids with this prefix, from all coordinators.

    With `states`, only ids in one of these states. May miss an id whose coordinator changes meanwhile. Raises Refused,
    Unavailable.
    """
    return {
        str(each.transactional_id): str(each.transaction_state)
        for reply in cluster.call_every_node(lambda connection: _list_on_node(connection, states))
        for each in reply
        if str(each.transactional_id).startswith(prefix)
    }


def open_transactions(cluster: Cluster) -> list[TransactionInfo]:
    """Returns all open transactions, oldest first. Raises Refused, Unavailable."""

    def call(connection: Connection) -> list[TransactionInfo]:
        names = tuple(each.transactional_id for each in _list_on_node(connection, _OPEN_STATES))
        if not names:
            return []
        request = schema_class("describe_transactions.v0.request:DescribeTransactionsRequest")(
            transactional_ids=names
        )
        reply = connection.call(request).transaction_states
        return [_transaction_info(each) for each in reply if each.transaction_state in _OPEN_STATES]

    found = (each for some in cluster.call_every_node(call) for each in some)
    return sorted(found, key=lambda each: (each.start_ms, each.transactional_id))


def current_producer(cluster: Cluster, transactional_id: str) -> ProducerIdAndEpoch | None:
    """Returns the current producer id and epoch of a transactional id; None if it is unknown.

    Raises Refused, Unavailable.
    """
    name = transactional_id.encode()
    body = b"\x02" + encode_uvarint(len(name) + 1) + name + b"\x00"

    def call(connection: Connection) -> ProducerIdAndEpoch | None:
        response = connection.call_raw(_DESCRIBE_TRANSACTIONS, 0, [body])
        try:
            code, producer = _parse_description(response)
        except (MalformedFrame, struct.error):
            connection.close()
            raise Unavailable(
                f"{connection.peer} sent a malformed description of {transactional_id}"
            ) from None
        if code is ErrorCode.transactional_id_not_found:
            return None
        raise_for_error(code, f"transactional id {transactional_id}")
        return producer

    return cluster.call_coordinator(CoordinatorType.TRANSACTION, transactional_id, call)


def _parse_description(response: memoryview) -> tuple[ErrorCode, ProducerIdAndEpoch]:
    """Parses by hand, because kio's reader refuses the missing start time of an id without a transaction."""
    (code,) = _ERROR_CODE.unpack_from(response, _FIRST_STATE_OFFSET)
    position = _FIRST_STATE_OFFSET + _ERROR_CODE.size
    for _ in ("id", "state"):
        length, position = read_uvarint(response, position, len(response))
        position += length - 1
    producer_id, epoch = _PRODUCER_ID_AND_EPOCH.unpack_from(response, position + _TIMEOUT_AND_START_BYTES)
    return parse_error_code(code), ProducerIdAndEpoch(producer_id, epoch)


def _list_on_node(connection: Connection, states: tuple[str, ...] = ()) -> tuple[Any, ...]:
    request = schema_class("list_transactions.v1.request:ListTransactionsRequest")(
        state_filters=states, producer_id_filters=(), duration_filter=-1
    )
    response = connection.call(request)
    raise_for_error(response.error_code, f"the transactions that {connection.peer} coordinates")
    return tuple(response.transaction_states)


def _transaction_info(reply: Any) -> TransactionInfo:
    return TransactionInfo(
        transactional_id=str(reply.transactional_id),
        state=str(reply.transaction_state),
        producer=ProducerIdAndEpoch(int(reply.producer_id), int(reply.producer_epoch)),
        timeout_ms=int(reply.transaction_timeout / timedelta(milliseconds=1)),
        start_ms=int(reply.transaction_start_time.timestamp() * 1000),
        partitions=tuple(
            sorted((str(topic.topic), int(index)) for topic in reply.topics for index in topic.partitions)
        ),
    )
