"""Replica placement for new partitions: over racks first, then evenly over brokers, from a random start.

Each partition starts with the next rack, so that leaders spread; inside a rack, brokers are chosen round-robin. A
fenced broker is chosen only when its rack has no other left for the partition, and never leads; a rack without any live
broker is chosen only when there are too few others. Manual replica lists of requests are checked here as well.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar
from uuid import UUID

from penstock.cluster.controller.partition_change import default_directory, replicas_by_broker
from penstock.cluster.image import ClusterImage
from penstock.cluster.metadata_records import PartitionRecord
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps

#: `draw(n)` gives a number from 0 to n - 1.
Draw = Callable[[int], int]
T = TypeVar("T")


class UsableBroker(NamedTuple):
    id: int
    rack: str | None = None
    fenced: bool = False


def place_replicas(
    brokers: Sequence[UsableBroker], *, partitions: int, replication_factor: int, draw: Draw
) -> Steps[list[tuple[int, ...]]]:
    """The replicas of each new partition, leader first. Raises INVALID_REPLICATION_FACTOR."""
    _refuse_impossible(brokers, replication_factor)
    racks = _racks(brokers, draw)
    start = draw(len(racks))
    placed = []
    for number in range(partitions):
        placed.append(_place_one(racks, start + number, replication_factor))
        yield
    return placed


class _Rack:
    """The brokers of one rack, chosen round-robin: separately as leaders, and as followers of another rack."""

    __slots__ = ("_follows", "_leads", "fenced", "live")

    def __init__(self, live: list[int], fenced: list[int], draw: Draw) -> None:
        self.live = live
        self.fenced = fenced
        self._leads = draw(max(1, len(live)))
        self._follows = draw(max(1, len(live)))

    def next_leader(self) -> list[int]:
        """Returns the next leader, then its possible followers, whose order changes with every round."""
        turn, self._leads = self._leads, self._leads + 1
        leader, *others = _rotated(self.live, turn)
        return [leader, *_rotated(others, turn // len(self.live)), *_rotated(self.fenced, turn)]

    def next_followers(self) -> list[int]:
        """Starts every round one broker further, so that a leader does not always have the same follower."""
        turn, self._follows = self._follows, self._follows + 1
        return _rotated(self.live, turn + turn // max(1, len(self.live))) + _rotated(self.fenced, turn)


def _refuse_impossible(brokers: Sequence[UsableBroker], replication_factor: int) -> None:
    if replication_factor <= 0:
        raise _cannot_place(replication_factor, "the replication factor must be larger than 0.")
    if all(broker.fenced for broker in brokers):
        raise _cannot_place(replication_factor, "All brokers are currently fenced.")
    if replication_factor > len(brokers):
        raise _cannot_place(
            replication_factor,
            f"The target replication factor of {replication_factor} cannot be reached because only "
            f"{len(brokers)} broker(s) are registered.",
        )


def _racks(brokers: Sequence[UsableBroker], draw: Draw) -> list[_Rack]:
    by_rack: dict[str, tuple[list[int], list[int]]] = {}
    for broker in sorted(brokers):
        live, fenced = by_rack.setdefault(broker.rack or "", ([], []))
        (fenced if broker.fenced else live).append(broker.id)
    return [_Rack(live, fenced, draw) for _, (live, fenced) in sorted(by_rack.items())]


def _place_one(racks: list[_Rack], start: int, replication_factor: int) -> tuple[int, ...]:
    live, fenced = [rack for rack in racks if rack.live], [rack for rack in racks if not rack.live]
    ring = (_rotated(live, start) + _rotated(fenced, start))[:replication_factor]
    orders = [ring[0].next_leader(), *(rack.next_followers() for rack in ring[1:])]
    laps = max(len(order) for order in orders)
    taken = [order[lap] for lap in range(laps) for order in orders if lap < len(order)]
    return tuple(taken[:replication_factor])


def _rotated(items: list[T], by: int) -> list[T]:
    by %= max(1, len(items))
    return items[by:] + items[:by]


def _cannot_place(replication_factor: int, why: str) -> ApiError:
    return ApiError(
        ErrorCode.invalid_replication_factor,
        f"Unable to replicate the partition {replication_factor} time(s): {why}",
    )


Replicas = tuple[int, ...]

#: Above the number of replicas of any broker.
REPLICAS_UNLIMITED: Final = 1 << 31


def assign_replicas(
    image: ClusterImage, *, partitions: int, replication_factor: int, draw: Draw
) -> Steps[list[Replicas]]:
    """Raises INVALID_REPLICATION_FACTOR."""
    candidates = [
        UsableBroker(broker.id, broker.rack_or_host, not broker.is_active)
        for broker in image.brokers.values()
    ]
    return (
        yield from place_replicas(
            candidates, partitions=partitions, replication_factor=replication_factor, draw=draw
        )
    )


def refuse_bad_replicas(image: ClusterImage, replicas: Replicas, expected: int | None) -> None:
    """Checks a manual replica list; `expected` is the number of replicas of the topic's other partitions."""
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
) -> Steps[list[PartitionRecord]]:
    """Numbers the partitions from `first`. Raises INVALID_REPLICA_ASSIGNMENT if one has no active replica."""
    records = []
    for number, replicas in enumerate(assignments):
        records.append(_partition_record(image, topic_id, first + number, replicas))
        yield
    return records


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


class ReplicaLimit:
    """Counts the replicas that each broker has and that one request adds."""

    def __init__(self, image: ClusterImage, replicas_max: int) -> None:
        self._image = image
        self._replicas_max = replicas_max
        self._partitions = sum(len(topic.partitions) for topic in image.topics.values())
        self._added: Counter[int] = Counter()
        self._existing: Counter[int] | None = None

    def add(self, assignments: Sequence[Replicas]) -> None:
        """Raises POLICY_VIOLATION, and adds nothing, if a broker would exceed its limit."""
        added = self._added + Counter(broker for replicas in assignments for broker in replicas)
        # A broker has at most one replica of each partition, so replicas are counted only near the limit.
        if self._partitions + max(added.values(), default=0) > self._replicas_max:
            self._existing = self._existing or replicas_by_broker(self._image)
            broker, count = max((self._existing + added).items(), key=lambda item: item[1])
            if count > self._replicas_max:
                raise ApiError(
                    ErrorCode.policy_violation,
                    f"Broker {broker} would have {count} partitions, and penstock.broker.partitions.max allows "
                    f"{self._replicas_max}; where that is 0, it follows from the limit of open files.",
                )
        self._added = added
