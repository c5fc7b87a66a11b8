"""Finds transactions: coordinators describe transactional ids, partition leaders describe producers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final, NamedTuple

from penstock.client.errors import UnsupportedVersion, raise_for_error
from penstock.client.wire.cluster import Cluster, CoordinatorType
from penstock.client.wire.connection import Connection
from penstock.client.wire.metadata import NO_LEADER, TopicPartition, by_topic
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class

_EMPTY_STATE: Final = "Empty"


class TransactionDescription(NamedTuple):
    """The fields with defaults are known only after the first transaction of the id has begun."""

    transactional_id: str
    state: str
    producer_id: int
    epoch: int | None = None
    timeout_ms: int | None = None
    start_ms: int | None = None
    partitions: tuple[TopicPartition, ...] = ()


class OpenProducer(NamedTuple):
    """A producer with an open transaction in a partition, as the partition's leader sees it."""

    topic: str
    partition: int
    producer_id: int
    epoch: int
    coordinator_epoch: int
    start_offset: int
    last_ms: int


def list_transaction_descriptions(cluster: Cluster) -> list[TransactionDescription]:
    """All transactional ids that the coordinators know. Raises Refused, Unavailable."""

    def ask(connection: Connection) -> list[TransactionDescription]:
        try:
            return _describe_all(connection)
        except UnsupportedVersion:
            return []

    return sorted(found for some in cluster.call_every_node(ask) for found in some)


def find_transaction(cluster: Cluster, transactional_id: str) -> TransactionDescription | None:
    """None if its coordinator does not know the id. Raises Refused, Unavailable."""
    found = cluster.call_coordinator(CoordinatorType.TRANSACTION, transactional_id, _describe_all)
    return next((each for each in found if each.transactional_id == transactional_id), None)


def _describe_all(connection: Connection) -> list[TransactionDescription]:
    """All ids of this coordinator.

    An id that becomes Empty between the two requests has a negative start time, which kio cannot decode: then the
    connection raises Unavailable, and the cluster retries.
    """
    request = schema_class("list_transactions.v1.request:ListTransactionsRequest")(
        state_filters=(), producer_id_filters=(), duration_filter=-1
    )
    listed = connection.call(request)
    raise_for_error(listed.error_code, f"transactions of {connection.peer}")
    empty = [each for each in listed.transaction_states if each.transaction_state == _EMPTY_STATE]
    names = tuple(each.transactional_id for each in listed.transaction_states if each not in empty)
    request = schema_class("describe_transactions.v0.request:DescribeTransactionsRequest")(
        transactional_ids=names
    )
    described = connection.call(request).transaction_states if names else ()
    return [
        *(
            TransactionDescription(str(each.transactional_id), _EMPTY_STATE, int(each.producer_id))
            for each in empty
        ),
        *(_description(each) for each in described if each.error_code is ErrorCode.none),
    ]


def _description(found: Any) -> TransactionDescription:
    partitions = ((str(topic.topic), int(index)) for topic in found.topics for index in topic.partitions)
    return TransactionDescription(
        str(found.transactional_id),
        str(found.transaction_state),
        int(found.producer_id),
        int(found.producer_epoch),
        int(found.transaction_timeout / timedelta(milliseconds=1)),
        int(found.transaction_start_time.timestamp() * 1000),
        tuple(sorted(partitions)),
    )


def list_open_producers(cluster: Cluster) -> list[OpenProducer]:
    """Covers all partitions that have a leader. Raises Refused, Unavailable."""
    led: defaultdict[int, list[TopicPartition]] = defaultdict(list)
    for topic in cluster.topics().values():
        for part in topic.partitions:
            if part.leader_id != NO_LEADER:
                led[part.leader_id].append((topic.name, part.index))

    def describe(leader_id: int, partitions: Iterable[TopicPartition]) -> list[OpenProducer]:
        request = _describe_producers_request(partitions)
        return cluster.call_node(leader_id, lambda connection: _open_producers(connection.call(request)))

    return sorted(found for leader_id, partitions in led.items() for found in describe(leader_id, partitions))


def _describe_producers_request(partitions: Iterable[TopicPartition]) -> Any:
    module = "describe_producers.v0.request"
    topic = schema_class(f"{module}:TopicRequest")
    return schema_class(f"{module}:DescribeProducersRequest")(
        topics=tuple(
            topic(name=name, partition_indexes=tuple(index for index, _ in parts))
            for name, parts in by_topic((each, None) for each in partitions).items()
        )
    )


def _open_producers(response: Any) -> list[OpenProducer]:
    return [
        OpenProducer(
            str(topic.name),
            int(part.partition_index),
            int(producer.producer_id),
            int(producer.producer_epoch),
            int(producer.coordinator_epoch),
            int(producer.current_txn_start_offset),
            int(producer.last_timestamp),
        )
        for topic in response.topics
        for part in topic.partitions
        for producer in part.active_producers
        if int(producer.current_txn_start_offset) >= 0
    ]


def write_abort_marker(cluster: Cluster, found: OpenProducer) -> None:
    """Writes an abort marker to this partition only, as a coordinator would. Raises Refused, Unavailable."""
    module = "write_txn_markers.v1.request"
    topic = schema_class(f"{module}:WritableTxnMarkerTopic")(
        name=found.topic, partition_indexes=(found.partition,)
    )
    marker = schema_class(f"{module}:WritableTxnMarker")(
        producer_id=found.producer_id,
        producer_epoch=found.epoch,
        transaction_result=False,
        topics=(topic,),
        coordinator_epoch=max(found.coordinator_epoch, 0),
    )
    request = schema_class(f"{module}:WriteTxnMarkersRequest")(markers=(marker,))

    def ask(connection: Connection) -> None:
        result = connection.call(request).markers[0].topics[0].partitions[0]
        raise_for_error(result.error_code, f"{found.topic}[{found.partition}]")

    cluster.call_leader(found.topic, found.partition, ask)
