"""AssignReplicasToDirs: a broker says where its replicas are, or that a copy is gone or damaged."""

from collections.abc import Sequence
from typing import Final, NamedTuple
from uuid import UUID

from penstock.cluster.controller.leadership import current_broker
from penstock.cluster.controller.partition_change import Changes
from penstock.cluster.controller.rules import ControllerRules
from penstock.cluster.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.state import BrokerState
from penstock.protocol.errors import ApiError, ErrorCode

#: The directory of a replica that is in none any more.
LOST_DIRECTORY: Final = UUID(int=2)


class DirectoryAssignment(NamedTuple):
    topic_id: UUID
    partition: int
    directory: UUID


class DirectoryResult(NamedTuple):
    topic_id: UUID
    partition: int
    directory: UUID
    error: ErrorCode = ErrorCode.none


def assign_replicas_to_dirs(
    image: ClusterImage,
    items: Sequence[DirectoryAssignment],
    *,
    broker_id: int,
    broker_epoch: int,
    rules: ControllerRules,
) -> Decision[tuple[DirectoryResult, ...]]:
    """A lost copy leaves the in-sync set and may not lead until it has been fetched again; its directory
    stays where it is. One result per item, in order. Raises STALE_BROKER_EPOCH."""
    broker = current_broker(image, broker_id, broker_epoch)
    changes = Changes(image, rules)
    done: set[tuple[UUID, int]] = set()
    results = []
    for item in items:
        try:
            if (item.topic_id, item.partition) in done:
                raise ApiError(ErrorCode.invalid_request)
            done.add((item.topic_id, item.partition))
            _assign(changes, broker, item)
            results.append(DirectoryResult(*item))
        except ApiError as error:
            results.append(DirectoryResult(*item, error.code))
    return changes.decision(tuple(results))


def _assign(changes: Changes, broker: BrokerState, item: DirectoryAssignment) -> None:
    topic = changes.image.topics_by_id.get(item.topic_id)
    if topic is None:
        raise ApiError(ErrorCode.unknown_topic_id)
    if item.partition not in topic.partitions:
        raise ApiError(ErrorCode.unknown_topic_or_partition)
    if broker.id not in topic.partitions[item.partition].replicas:
        raise ApiError(ErrorCode.not_leader_or_follower)
    change = changes.of(topic, item.partition)
    if item.directory == LOST_DIRECTORY:
        change.lose(broker.id)
    elif item.directory in broker.log_dirs:
        change.directories[broker.id] = item.directory
    else:
        raise ApiError(ErrorCode.invalid_request)
    changes.add(change)
