"""Cluster metadata as a client sees it: brokers, topics, and the leader of each partition."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import Any, Final, TypeVar
from uuid import UUID

from penstock.client.errors import raise_for_error
from penstock.client.wire.settings import Address
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class

#: Topic and partition.
TopicPartition = tuple[str, int]
#: Before this version, a metadata request for a missing topic creates it.
METADATA_VERSION_MIN: Final = 4
NO_LEADER: Final = -1
NO_EPOCH: Final = -1
_NO_ID: Final = UUID(int=0)
#: Errors of a topic that does not exist, or not yet.
_ABSENT_ERRORS: Final = frozenset(
    {
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.unknown_topic_id,
        ErrorCode.leader_not_available,
    }
)


class IsolationLevel(IntEnum):
    """Numbered as on the wire."""

    READ_UNCOMMITTED = 0
    READ_COMMITTED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerInfo:
    id: int
    host: str
    port: int
    rack: str | None = None

    @property
    def address(self) -> Address:
        return self.host, self.port


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionInfo:
    index: int
    leader_id: int  # NO_LEADER if there is none at present
    leader_epoch: int
    replicas: tuple[int, ...] = ()
    in_sync: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicInfo:
    name: str
    id: UUID | None  # None for brokers without topic ids
    partitions: tuple[PartitionInfo, ...]
    is_internal: bool = False

    def partition(self, index: int) -> PartitionInfo | None:
        return self.partitions[index] if 0 <= index < len(self.partitions) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataView:
    """The metadata that one broker returned."""

    cluster_id: str | None
    controller_id: int
    nodes: dict[int, BrokerInfo]
    topics: dict[str, TopicInfo]


def metadata_request(names: Iterable[str] | None, *, creates: bool = False) -> Any:
    """Requests metadata of these topics, or of all. With `creates`, brokers may create missing topics."""
    module = "metadata.v12.request"
    topics = None
    if names is not None:
        topic = schema_class(f"{module}:MetadataRequestTopic")
        topics = tuple(topic(topic_id=None, name=name) for name in names)
    return schema_class(f"{module}:MetadataRequest")(
        topics=topics, allow_auto_topic_creation=creates, include_topic_authorized_operations=False
    )


def metadata_view(response: Any) -> MetadataView:
    """Raises Refused if the client may not describe a topic."""
    nodes = [
        BrokerInfo(
            id=int(each.node_id), host=str(each.host), port=int(each.port), rack=getattr(each, "rack", None)
        )
        for each in response.brokers
    ]
    topics = [_topic_info(each) for each in response.topics if each.error_code not in _ABSENT_ERRORS]
    return MetadataView(
        cluster_id=getattr(response, "cluster_id", None),
        controller_id=int(getattr(response, "controller_id", NO_LEADER)),
        nodes={node.id: node for node in nodes},
        topics={topic.name: topic for topic in topics},
    )


def _topic_info(reply: Any) -> TopicInfo:
    raise_for_error(reply.error_code, f"topic {reply.name}")
    topic_id = getattr(reply, "topic_id", None)
    return TopicInfo(
        name=str(reply.name),
        id=topic_id if topic_id not in (None, _NO_ID) else None,
        partitions=tuple(map(_partition_info, sorted(reply.partitions, key=attrgetter("partition_index")))),
        is_internal=bool(getattr(reply, "is_internal", False)),
    )


def _partition_info(reply: Any) -> PartitionInfo:
    return PartitionInfo(
        index=int(reply.partition_index),
        leader_id=int(reply.leader_id),
        leader_epoch=int(getattr(reply, "leader_epoch", NO_EPOCH)),
        replicas=tuple(map(int, reply.replica_nodes)),
        in_sync=tuple(map(int, reply.isr_nodes)),
    )


Value = TypeVar("Value")


def by_topic(items: Iterable[tuple[TopicPartition, Value]]) -> dict[str, list[tuple[int, Value]]]:
    grouped: dict[str, list[tuple[int, Value]]] = {}
    for (topic, partition), value in items:
        grouped.setdefault(topic, []).append((partition, value))
    return grouped
