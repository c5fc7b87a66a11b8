"""What decisions about leaders are made of."""

from collections.abc import Collection, Iterator

from penstock.cluster.controller.partition_change import is_concerned
from penstock.cluster.image import ClusterImage
from penstock.cluster.state import BrokerState, PartitionState, TopicState
from penstock.protocol.errors import ApiError, ErrorCode


def all_partitions(image: ClusterImage) -> Iterator[tuple[TopicState, int, PartitionState]]:
    for topic in image.topics.values():
        for index, partition in topic.partitions.items():
            yield topic, index, partition


def partitions_of(image: ClusterImage, brokers: Collection[int]) -> Iterator[tuple[TopicState, int]]:
    """Where one of these brokers is in sync, or eligible, or led last."""
    for topic, index, partition in all_partitions(image):
        if is_concerned(partition, brokers):
            yield topic, index


def leads_something(image: ClusterImage, broker: int) -> bool:
    return any(partition.leader == broker for _, _, partition in all_partitions(image))


def registered(image: ClusterImage, broker_id: int) -> BrokerState:
    broker = image.brokers.get(broker_id)
    if broker is None:
        raise ApiError(
            ErrorCode.broker_id_not_registered, f"Broker ID {broker_id} is not currently registered"
        )
    return broker


def current_broker(image: ClusterImage, broker_id: int, broker_epoch: int) -> BrokerState:
    """A broker that speaks for itself. Raises STALE_BROKER_EPOCH when it has been replaced or forgotten."""
    broker = image.brokers.get(broker_id)
    if broker is None:
        raise ApiError(
            ErrorCode.stale_broker_epoch, f"No broker registration found for broker id {broker_id}"
        )
    if broker.epoch != broker_epoch:
        raise ApiError(
            ErrorCode.stale_broker_epoch,
            f"Expected broker epoch {broker.epoch}, but got broker epoch {broker_epoch}",
        )
    return broker
