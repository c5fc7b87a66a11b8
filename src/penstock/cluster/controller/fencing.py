"""Brokers are fenced, unfenced and forgotten; leadership follows them."""

from dataclasses import replace

from penstock.cluster.controller.leadership import all_partitions, partition_change
from penstock.cluster.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.records import NO_LEADER, PartitionChangeRecord
from penstock.cluster.seldom_records import BrokerRegistrationChangeRecord, UnregisterBrokerRecord
from penstock.cluster.state import BrokerState, PartitionState, TopicState
from penstock.protocol.errors import ApiError, ErrorCode

_FENCE, _UNFENCE = 1, -1


def fence_broker(image: ClusterImage, broker_id: int) -> Decision[None]:
    """It leaves every in-sync set it is not the last of, and leads nothing."""
    broker = _registered(image, broker_id)
    change = _registration_change(broker, _FENCE)
    return Decision((change, *_leadership_without(image, broker_id)), None)


def unfence_broker(image: ClusterImage, broker_id: int, *, broker_epoch: int) -> Decision[None]:
    """It takes the lead where nobody had it and it is in sync. Raises STALE_BROKER_EPOCH."""
    broker = _registered(image, broker_id)
    if broker.epoch != broker_epoch:
        raise ApiError(
            ErrorCode.stale_broker_epoch,
            f"Broker {broker_id} is at epoch {broker.epoch}, not {broker_epoch}.",
        )
    elections = tuple(
        partition_change(topic, index, leader=broker_id)
        for topic, index, partition in all_partitions(image)
        if not partition.has_leader and broker_id in partition.isr
    )
    return Decision((_registration_change(broker, _UNFENCE), *elections), None)


def unregister_broker(image: ClusterImage, broker_id: int) -> Decision[None]:
    broker = _registered(image, broker_id)
    gone = UnregisterBrokerRecord(broker_id=broker.id, broker_epoch=broker.epoch)
    return Decision((*_leadership_without(image, broker_id), gone), None)


def _registered(image: ClusterImage, broker_id: int) -> BrokerState:
    broker = image.brokers.get(broker_id)
    if broker is None:
        raise ApiError(
            ErrorCode.broker_id_not_registered, f"Broker ID {broker_id} is not currently registered"
        )
    return broker


def _registration_change(broker: BrokerState, fenced: int) -> BrokerRegistrationChangeRecord:
    return BrokerRegistrationChangeRecord(broker_id=broker.id, broker_epoch=broker.epoch, fenced=fenced)


def _leadership_without(image: ClusterImage, broker_id: int) -> list[PartitionChangeRecord]:
    return [
        _without(image, topic, index, partition, broker_id)
        for topic, index, partition in all_partitions(image)
        if broker_id in partition.isr and (len(partition.isr) > 1 or partition.leader == broker_id)
    ]


def _without(
    image: ClusterImage, topic: TopicState, index: int, partition: PartitionState, gone: int
) -> PartitionChangeRecord:
    others = tuple(broker for broker in partition.isr if broker != gone)
    # The last in-sync replica stays listed: it alone is known to have everything that was acknowledged.
    change = partition_change(topic, index)
    if others:
        change = replace(change, isr=others)
    if partition.leader == gone:
        change = replace(change, leader=_first_active(image, partition.replicas, others))
    return change


def _first_active(image: ClusterImage, replicas: tuple[int, ...], in_sync: tuple[int, ...]) -> int:
    return next(
        (
            broker
            for broker in replicas
            if broker in in_sync and broker in image.brokers and image.brokers[broker].is_active
        ),
        NO_LEADER,
    )
