"""What `penstock transaction` asks on the wire: coordinators about transactional ids, leaders about producers."""

import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple

from penstock.cli.client import Cluster, Place
from penstock.cli.coordinators import (
    PATIENCE_S,
    TRANSACTION,
    ask_coordinator,
    ask_everyone,
    coordinator_of,
    refuse_error,
)
from penstock.cli.failure import Failure
from penstock.cli.wire import Address, ask
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class

#: Ours is over at once; how long a producer of that id may take is told by the next one.
_TIMEOUT_MS: Final = 60_000
_ABORT_S_MAX: Final = 30.0
_ASK_AGAIN_S: Final = 0.1
_BUSY: Final = (
    ErrorCode.concurrent_transactions,
    ErrorCode.coordinator_load_in_progress,
    ErrorCode.not_coordinator,
)
_NONE: Final = -1
_EMPTY: Final = "Empty"
_ATTEMPTS: Final = 3


class Transaction(NamedTuple):
    transactional_id: str
    state: str
    producer_id: int
    #: These are told once the first transaction has begun.
    epoch: int | None = None
    timeout_ms: int | None = None
    start_ms: int | None = None
    places: tuple[Place, ...] = ()


class OpenProducer(NamedTuple):
    """A producer with an open transaction in a partition, as the partition's leader sees it."""

    place: Place
    producer_id: int
    epoch: int
    coordinator_epoch: int
    start_offset: int
    last_ms: int


def every_transaction(cluster: Cluster) -> list[Transaction]:
    return sorted(ask_everyone(cluster, _coordinated_by))


def _coordinated_by(address: Address) -> list[Transaction]:
    """One that falls empty between the two questions cannot be described, so these are asked again."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(OSError):
            return _coordinated_now(address)
    return _coordinated_now(address)


def _coordinated_now(address: Address) -> list[Transaction]:
    request = schema_class("list_transactions.v1.request:ListTransactionsRequest")(
        state_filters=(), producer_id_filters=(), duration_filter=_NONE
    )
    answer = ask(address, request)
    refuse_error(answer, "transactions")
    # The start of what has not begun is before all time, which cannot be read.
    empty = [found for found in answer.transaction_states if found.transaction_state == _EMPTY]
    names = [found.transactional_id for found in answer.transaction_states if found not in empty]
    request = schema_class("describe_transactions.v0.request:DescribeTransactionsRequest")(
        transactional_ids=tuple(names)
    )
    described = ask(address, request).transaction_states
    return [
        *(Transaction(str(found.transactional_id), _EMPTY, int(found.producer_id)) for found in empty),
        *(_transaction(found) for found in described if found.error_code.value == 0),
    ]


def describe_transaction(cluster: Cluster, name: str) -> Transaction:
    """Raises Failure."""
    coordinator = coordinator_of(cluster, name, TRANSACTION)
    try:
        found = [each for each in _coordinated_by(coordinator.address) if each.transactional_id == name]
    except OSError as error:
        raise Failure(f"node {coordinator.node} does not answer: {error}") from None
    if not found:
        raise Failure(
            f"nobody has used the transactional id {name} lately",
            hint="penstock transaction list shows those that are known",
        )
    return found[0]


def _transaction(found: Any) -> Transaction:
    return Transaction(
        str(found.transactional_id),
        str(found.transaction_state),
        int(found.producer_id),
        int(found.producer_epoch),
        int(found.transaction_timeout / timedelta(milliseconds=1)),
        int(found.transaction_start_time.timestamp() * 1000),
        tuple(
            sorted(
                Place(str(topic.topic), int(index)) for topic in found.topics for index in topic.partitions
            )
        ),
    )


def fence(cluster: Cluster, name: str) -> None:
    """Take the id over as a new producer would: what is open under it is aborted. Raises Failure."""
    request = schema_class("init_producer_id.v4.request:InitProducerIdRequest")(
        transactional_id=name,
        transaction_timeout=timedelta(milliseconds=_TIMEOUT_MS),
        producer_id=_NONE,
        producer_epoch=_NONE,
    )
    deadline = time.monotonic() + _ABORT_S_MAX
    while True:
        answer = ask_coordinator(cluster, name, TRANSACTION, request)
        if answer.error_code not in _BUSY or time.monotonic() > deadline:
            refuse_error(answer, f"transactional id {name}")
            return
        time.sleep(_ASK_AGAIN_S)


def open_producers(cluster: Cluster) -> list[OpenProducer]:
    """In all partitions that have a leader."""
    metadata = cluster.metadata()
    addresses = {int(broker.id): (str(broker.host), int(broker.port)) for broker in metadata.brokers.values()}
    led: defaultdict[Address, list[Place]] = defaultdict(list)
    for name, topic in metadata.topics.items():
        for index, partition in topic.partitions.items():
            if int(partition.leader) in addresses:
                led[addresses[int(partition.leader)]].append(Place(name, index))
    return sorted(found for address, places in led.items() for found in _producers(address, places))


def _producers(address: Address, places: Iterable[Place]) -> Iterable[OpenProducer]:
    module = "describe_producers.v0.request"
    by_topic: defaultdict[str, list[int]] = defaultdict(list)
    for place in places:
        by_topic[place.topic].append(place.partition)
    topics = tuple(
        schema_class(f"{module}:TopicRequest")(name=name, partition_indexes=tuple(indexes))
        for name, indexes in by_topic.items()
    )
    answer = _ask_leader(address, schema_class(f"{module}:DescribeProducersRequest")(topics=topics))
    return [
        OpenProducer(
            Place(str(topic.name), int(part.partition_index)),
            int(producer.producer_id),
            int(producer.producer_epoch),
            int(producer.coordinator_epoch),
            int(producer.current_txn_start_offset),
            int(producer.last_timestamp),
        )
        for topic in answer.topics
        for part in topic.partitions
        for producer in part.active_producers
        if int(producer.current_txn_start_offset) >= 0
    ]


def write_abort(cluster: Cluster, found: OpenProducer) -> None:
    """An abort marker for this partition only, as a coordinator would write it. Raises Failure."""
    module = "write_txn_markers.v1.request"
    topic = schema_class(f"{module}:WritableTxnMarkerTopic")(
        name=found.place.topic, partition_indexes=(found.place.partition,)
    )
    marker = schema_class(f"{module}:WritableTxnMarker")(
        producer_id=found.producer_id,
        producer_epoch=found.epoch,
        transaction_result=False,
        topics=(topic,),
        coordinator_epoch=max(found.coordinator_epoch, 0),
    )
    request = schema_class(f"{module}:WriteTxnMarkersRequest")(markers=(marker,))
    metadata = cluster.metadata()
    leader = metadata.brokers[metadata.topics[found.place.topic].partitions[found.place.partition].leader]
    answer = _ask_leader((str(leader.host), int(leader.port)), request)
    outcome = answer.markers[0].topics[0].partitions[0]
    if outcome.error_code.name == "cluster_authorization_failed":
        raise Failure(
            f"{found.place}: the broker takes markers only on its listener for nodes",
            hint="-b gives the address of that listener, NODES in the node's settings",
        )
    refuse_error(outcome, str(found.place))


def _ask_leader(address: Address, request: Any) -> Any:
    """Raises Failure."""
    try:
        return ask(address, request, timeout_s=PATIENCE_S)
    except OSError as error:
        raise Failure(f"the broker at {address[0]}:{address[1]} does not answer: {error}") from None
