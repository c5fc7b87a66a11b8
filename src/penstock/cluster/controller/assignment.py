"""Replica lists for new partitions: chosen by placement, or given by hand and checked."""

from collections.abc import Sequence
from uuid import UUID

from penstock.cluster.controller.partition_change import default_directory
from penstock.cluster.image import ClusterImage
from penstock.cluster.placement import Candidate, Draw, place_replicas
from penstock.cluster.records import PartitionRecord
from penstock.protocol.errors import ApiError, ErrorCode

Replicas = tuple[int, ...]


def placed(image: ClusterImage, *, partitions: int, replication_factor: int, draw: Draw) -> list[Replicas]:
    """Raises INVALID_REPLICATION_FACTOR."""
    candidates = [
        Candidate(broker.id, broker.rack_or_host, not broker.is_active) for broker in image.brokers.values()
    ]
    return place_replicas(candidates, partitions=partitions, replication_factor=replication_factor, draw=draw)


def refuse_bad_replicas(image: ClusterImage, replicas: Replicas, expected: int | None) -> None:
    """A replica list given by hand; `expected` is the number that the topic's other partitions have."""
    if not replicas:
        raise _bad_assignment("The manual partition assignment includes an empty replica list.")
    for broker in sorted(replicas):
        if broker not in image.brokers:
            raise _bad_assignment(
                f"The manual partition assignment includes broker {broker}, but no such broker is registered."
            )
        if replicas.count(broker) > 1:
            raise _bad_assignment(
                f"The manual partition assignment includes the broker {broker} more than once."
            )
    if expected is not None and len(replicas) != expected:
        raise _bad_assignment(
            f"The manual partition assignment includes a partition with {len(replicas)} replica(s), but this "
            f"is not consistent with previous partitions, which have {expected} replica(s)."
        )


def partition_records(
    image: ClusterImage, topic_id: UUID, assignments: Sequence[Replicas], *, first: int = 0
) -> list[PartitionRecord]:
    """New partitions from `first` on. Raises INVALID_REPLICA_ASSIGNMENT when one has nobody to lead."""
    return [
        _partition_record(image, topic_id, first + number, replicas)
        for number, replicas in enumerate(assignments)
    ]


def _partition_record(
    image: ClusterImage, topic_id: UUID, partition: int, replicas: Replicas
) -> PartitionRecord:
    isr = tuple(broker for broker in replicas if image.brokers[broker].is_active)
    if not isr:
        raise _bad_assignment(
            f"All brokers specified in the manual partition assignment for partition {partition} "
            "are fenced or in controlled shutdown."
        )
    return PartitionRecord(
        partition_id=partition,
        topic_id=topic_id,
        replicas=replicas,
        isr=isr,
        leader=isr[0],
        leader_epoch=0,
        partition_epoch=0,
        directories=tuple(default_directory(image, broker) for broker in replicas),
    )


def _bad_assignment(message: str) -> ApiError:
    return ApiError(ErrorCode.invalid_replica_assignment, message)
