"""Replica lists for new partitions: chosen by placement, or given by hand and checked."""

from collections import Counter
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from penstock.cluster.controller.partition_change import default_directory
from penstock.cluster.image import ClusterImage
from penstock.cluster.placement import Candidate, Draw, place_replicas
from penstock.cluster.records import PartitionRecord
from penstock.protocol.errors import ApiError, ErrorCode

Replicas = tuple[int, ...]

#: More replicas than any broker has.
UNBOUNDED: Final = 1 << 31


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


class BrokerLoad:
    """How many replicas each broker has, and gets by one request."""

    def __init__(self, image: ClusterImage, replicas_max: int) -> None:
        self._image = image
        self._replicas_max = replicas_max
        self._partitions = sum(len(topic.partitions) for topic in image.topics.values())
        self._added: Counter[int] = Counter()
        self._existing: Counter[int] | None = None

    def add(self, assignments: Sequence[Replicas]) -> None:
        """Raises POLICY_VIOLATION, and has added nothing, where a broker would have more than it may."""
        added = self._added + Counter(broker for replicas in assignments for broker in replicas)
        # A broker has at most one replica of each partition, so counting them is seldom needed.
        if self._partitions + max(added.values(), default=0) > self._replicas_max:
            self._existing = self._existing or self._counted()
            broker, count = max((self._existing + added).items(), key=lambda item: item[1])
            if count > self._replicas_max:
                raise ApiError(
                    ErrorCode.policy_violation,
                    f"Broker {broker} would have {count} partitions, and penstock.broker.partitions.max allows "
                    f"{self._replicas_max}; where that is 0, it follows from the limit of open files.",
                )
        self._added = added

    def _counted(self) -> Counter[int]:
        return Counter(
            broker
            for topic in self._image.topics.values()
            for state in topic.partitions.values()
            for broker in state.replicas
        )
