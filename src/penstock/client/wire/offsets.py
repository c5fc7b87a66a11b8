"""Offsets: the start and end of a log, the offset at a time, and the committed offsets of groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.client.errors import (
    RETRIABLE_ERRORS,
    UNKNOWN_TOPIC_ERRORS,
    ClientError,
    Refused,
    Unavailable,
    broker_error,
    raise_for_error,
)
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import Cluster, CoordinatorType
from penstock.client.wire.connection import Connection
from penstock.client.wire.metadata import IsolationLevel, TopicPartition, by_topic
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class

#: Special timestamps of ListOffsets.
LATEST: Final = -1
EARLIEST: Final = -2

_OFFSET_FETCH: Final = 9
_GROUP_LIST_VERSION: Final = 8
#: Older versions cannot request all partitions.
_OFFSET_FETCH_VERSION_MIN: Final = 2
#: In older versions the client sets the retention of offsets.
_OFFSET_COMMIT_VERSION_MIN: Final = 5
_NO_OFFSET: Final = -1
_NO_MEMBER: Final = ""
_NO_GENERATION: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetAndTimestamp:
    offset: int
    timestamp_ms: int  # -1 for the ends of the log
    leader_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedOffset:
    offset: int
    leader_epoch: int = -1
    metadata: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    group: str
    state: str
    #: `classic`, `consumer` or `share`; empty for older brokers.
    kind: str
    protocol: str


# Log offsets


def list_offsets(
    cluster: Cluster,
    wanted: Mapping[TopicPartition, int],
    *,
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> dict[TopicPartition, OffsetAndTimestamp | None]:
    """Returns the offset of EARLIEST, LATEST or a timestamp for each partition; None if no record is as new.

    With READ_COMMITTED, LATEST is the last stable offset. Sends one request to each leader. Raises Unavailable and
    Refused.
    """
    found: dict[TopicPartition, OffsetAndTimestamp | None] = {}
    left = dict(wanted)
    deadline = Deadline(cluster.settings.retry_deadline_ms)
    unknown = Deadline(cluster.settings.unknown_topic_ms_max)
    last_error: ClientError | None = None
    for _ in cluster.attempts(deadline):
        last_error = _list_from_leaders(cluster, left, isolation, found)
        left = {
            topic_partition: when for topic_partition, when in left.items() if topic_partition not in found
        }
        if not left:
            return {topic_partition: found[topic_partition] for topic_partition in wanted}
        if isinstance(last_error, Refused) and (
            last_error.code not in UNKNOWN_TOPIC_ERRORS or unknown.is_over
        ):
            raise last_error
        for topic, _ in left:
            cluster.forget_topic(topic)
    raise Unavailable(
        f"no offsets of {_partition_names(left)} within {deadline.timeout_ms / 1000:g} s: {last_error}"
    )


def _list_from_leaders(
    cluster: Cluster,
    wanted: Mapping[TopicPartition, int],
    isolation: IsolationLevel,
    found: dict[TopicPartition, OffsetAndTimestamp | None],
) -> ClientError | None:
    """Adds the offsets to `found`, and returns the last error. It is Refused only if a retry may not fix it."""
    led: dict[int, dict[TopicPartition, int]] = {}
    last_error: ClientError | None = None
    try:
        cluster.learn_topics({topic for topic, _ in wanted})
        for topic_partition, when in wanted.items():
            led.setdefault(cluster.leader(*topic_partition).leader_id, {})[topic_partition] = when
    except (Refused, Unavailable) as error:
        last_error = _as_retriable(error)
    for node_id, requested in led.items():
        try:
            _list_from_node(cluster, node_id, requested, isolation, found)
        except (Refused, Unavailable) as error:
            last_error = _as_retriable(error)
    return last_error


def _as_retriable(error: Refused | Unavailable) -> ClientError:
    is_retriable = (
        isinstance(error, Refused)
        and error.code in RETRIABLE_ERRORS
        and error.code not in UNKNOWN_TOPIC_ERRORS
    )
    return Unavailable(str(error)) if is_retriable else error


def _list_from_node(
    cluster: Cluster,
    node_id: int,
    wanted: Mapping[TopicPartition, int],
    isolation: IsolationLevel,
    found: dict[TopicPartition, OffsetAndTimestamp | None],
) -> None:
    """Raises Refused with the last error of a partition."""
    refused: Refused | None = None
    response = cluster.connection(node_id).call(_list_offsets_request(cluster, wanted, isolation))
    for topic in response.topics:
        for each in topic.partitions:
            topic_partition = (str(topic.name), int(each.partition_index))
            if each.error_code is ErrorCode.none:
                found[topic_partition] = _offset_and_timestamp(each)
            else:
                refused = broker_error(each.error_code, _partition_names([topic_partition]))
    if refused is not None:
        raise refused


def _list_offsets_request(
    cluster: Cluster, wanted: Mapping[TopicPartition, int], isolation: IsolationLevel
) -> Any:
    module = "list_offsets.v7.request"
    partition = schema_class(f"{module}:ListOffsetsPartition")
    topic = schema_class(f"{module}:ListOffsetsTopic")
    topics = tuple(
        topic(
            name=name,
            partitions=tuple(
                partition(
                    partition_index=index,
                    current_leader_epoch=cluster.leader(name, index).leader_epoch,
                    timestamp=when,
                )
                for index, when in parts
            ),
        )
        for name, parts in by_topic(wanted.items()).items()
    )
    return schema_class(f"{module}:ListOffsetsRequest")(
        replica_id=-1, isolation_level=int(isolation), topics=topics
    )


def _offset_and_timestamp(reply: Any) -> OffsetAndTimestamp | None:
    if int(reply.offset) == _NO_OFFSET:
        return None
    return OffsetAndTimestamp(
        offset=int(reply.offset),
        timestamp_ms=int(reply.timestamp),
        leader_epoch=int(getattr(reply, "leader_epoch", -1)),
    )


# Committed offsets and groups


def committed_offsets(
    cluster: Cluster, group: str, partitions: Iterable[TopicPartition] | None = None, *, stable: bool = True
) -> dict[TopicPartition, CommittedOffset]:
    """Returns the group's committed offsets, for these partitions or for all.

    `stable` waits for the end of transactions that commit offsets of these partitions. Without `partitions`, the result
    does not contain offsets that exist only in such a transaction. Raises Unavailable, Refused.
    """
    wanted = (
        None if partitions is None else by_topic((topic_partition, None) for topic_partition in partitions)
    )

    def call(connection: Connection) -> dict[TopicPartition, CommittedOffset]:
        response = connection.call(
            _offset_fetch_request(connection, group, wanted, stable), oldest=_OFFSET_FETCH_VERSION_MIN
        )
        reply = response.groups[0] if hasattr(response, "groups") else response
        raise_for_error(getattr(reply, "error_code", ErrorCode.none), f"group {group}")
        return dict(_parse_committed(group, reply))

    return cluster.call_coordinator(CoordinatorType.GROUP, group, call)


def _offset_fetch_request(
    connection: Connection, group: str, wanted: Mapping[str, list[tuple[int, None]]] | None, stable: bool
) -> Any:
    is_many = connection.version(_OFFSET_FETCH, _GROUP_LIST_VERSION) >= _GROUP_LIST_VERSION
    module = "offset_fetch.v8.request" if is_many else "offset_fetch.v7.request"
    topic = schema_class(f"{module}:OffsetFetchRequestTopic{'s' if is_many else ''}")
    topics = None
    if wanted is not None:
        topics = tuple(
            topic(name=name, partition_indexes=tuple(index for index, _ in parts))
            for name, parts in wanted.items()
        )
    request = schema_class(f"{module}:OffsetFetchRequest")
    if not is_many:
        return request(group_id=group, topics=topics, require_stable=stable)
    requested = schema_class(f"{module}:OffsetFetchRequestGroup")(group_id=group, topics=topics)
    return request(groups=(requested,), require_stable=stable)


def _parse_committed(group: str, reply: Any) -> Iterable[tuple[TopicPartition, CommittedOffset]]:
    for topic in reply.topics:
        for each in topic.partitions:
            topic_partition = (str(topic.name), int(each.partition_index))
            raise_for_error(each.error_code, f"group {group} in {topic_partition[0]}[{topic_partition[1]}]")
            if int(each.committed_offset) != _NO_OFFSET:
                yield (
                    topic_partition,
                    CommittedOffset(
                        offset=int(each.committed_offset),
                        leader_epoch=int(getattr(each, "committed_leader_epoch", -1)),
                        metadata=str(each.metadata or ""),
                    ),
                )


def commit_offsets(
    cluster: Cluster,
    group: str,
    offsets: Mapping[TopicPartition, int | CommittedOffset],
    *,
    metadata: str = "",
    generation: int = _NO_GENERATION,
    member: str = _NO_MEMBER,
) -> None:
    """Commits offsets as a member, or from outside a group without members. Raises Unavailable, Refused."""
    if not offsets:
        return
    request = _offset_commit_request(group, offsets, metadata, generation, member)

    def call(connection: Connection) -> None:
        for topic in connection.call(request, oldest=_OFFSET_COMMIT_VERSION_MIN).topics:
            for each in topic.partitions:
                raise_for_error(
                    each.error_code,
                    f"offset of group {group} in {topic.name}[{each.partition_index}]",
                    "the group has active members"
                    if each.error_code is ErrorCode.unknown_member_id
                    else None,
                )

    cluster.call_coordinator(CoordinatorType.GROUP, group, call)


def _offset_commit_request(
    group: str,
    offsets: Mapping[TopicPartition, int | CommittedOffset],
    metadata: str,
    generation: int,
    member: str,
) -> Any:
    module = "offset_commit.v8.request"
    return schema_class(f"{module}:OffsetCommitRequest")(
        group_id=group,
        generation_id_or_member_epoch=generation,
        member_id=member,
        group_instance_id=None,
        topics=offset_topics(module, "OffsetCommitRequest", offsets, metadata),
    )


def offset_topics(
    module: str, prefix: str, offsets: Mapping[TopicPartition, int | CommittedOffset], metadata: str
) -> tuple[Any, ...]:
    """Returns the topics of an OffsetCommit or TxnOffsetCommit request."""
    partition = schema_class(f"{module}:{prefix}Partition")
    topic = schema_class(f"{module}:{prefix}Topic")
    values = (
        (topic_partition, _as_committed_offset(value, metadata)) for topic_partition, value in offsets.items()
    )
    return tuple(
        topic(
            name=name,
            partitions=tuple(
                partition(
                    partition_index=index,
                    committed_offset=value.offset,
                    committed_leader_epoch=value.leader_epoch,
                    committed_metadata=value.metadata,
                )
                for index, value in parts
            ),
        )
        for name, parts in by_topic(values).items()
    )


def _as_committed_offset(value: int | CommittedOffset, metadata: str) -> CommittedOffset:
    return value if isinstance(value, CommittedOffset) else CommittedOffset(offset=value, metadata=metadata)


def group_info(cluster: Cluster, group: str) -> GroupInfo | None:
    """Returns None if the group is unknown. Raises Unavailable, Refused."""
    request = schema_class("list_groups.v5.request:ListGroupsRequest")(states_filter=(), types_filter=())

    def call(connection: Connection) -> GroupInfo | None:
        response = connection.call(request)
        raise_for_error(response.error_code, f"group {group}")
        for each in response.groups:
            if each.group_id == group:
                return _group_info(each)
        return None

    return cluster.call_coordinator(CoordinatorType.GROUP, group, call)


def list_groups(cluster: Cluster) -> list[GroupInfo]:
    """Returns all groups of the cluster, sorted by name. Raises Unavailable, Refused."""
    request = schema_class("list_groups.v5.request:ListGroupsRequest")(states_filter=(), types_filter=())

    def call(connection: Connection) -> list[GroupInfo]:
        response = connection.call(request)
        raise_for_error(response.error_code, "groups")
        return [_group_info(each) for each in response.groups]

    found = {each.group: each for some in cluster.call_every_node(call) for each in some}
    return [found[name] for name in sorted(found)]


def _group_info(reply: Any) -> GroupInfo:
    return GroupInfo(
        group=str(reply.group_id),
        state=str(getattr(reply, "group_state", "")),
        kind=str(getattr(reply, "group_type", "")).lower(),
        protocol=str(reply.protocol_type),
    )


def _partition_names(topic_partitions: Iterable[TopicPartition]) -> str:
    return ", ".join(f"{topic}[{partition}]" for topic, partition in sorted(topic_partitions))
