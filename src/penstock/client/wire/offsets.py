"""Offsets: where a log begins and ends, what lies at a time, and how far a group has come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.client.cluster import Cluster, Coordinates
from penstock.client.connection import Connection
from penstock.client.errors import ClientError, Refused, Unavailable, check, refusal
from penstock.client.grouping import by_topic
from penstock.client.metadata import Isolation, Place
from penstock.client.remedies import REMEDIES, UNKNOWN_TOPIC
from penstock.client.retrying import Deadline
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class

#: Asked for in place of a timestamp.
LATEST: Final = -1
EARLIEST: Final = -2

_OFFSET_FETCH: Final = 9
_GROUPS_FROM: Final = 8
#: Before it nobody can ask for all partitions.
_OLDEST_FETCH: Final = 2
#: Before it the client says how long offsets are kept.
_OLDEST_COMMIT: Final = 5
_NO_OFFSET: Final = -1
_NO_MEMBER: Final = ""
_NO_GENERATION: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetAt:
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
    #: `classic`, `consumer`, `share`; empty where the broker does not tell.
    kind: str
    protocol: str


# In the log


def list_offsets(
    cluster: Cluster,
    wanted: Mapping[Place, int],
    *,
    isolation: Isolation = Isolation.READ_UNCOMMITTED,
) -> dict[Place, OffsetAt | None]:
    """For each partition EARLIEST, LATEST, or the first offset at or after a timestamp; None where there is none.

    With READ_COMMITTED the end is where the first open transaction begins. One request for each leader.
    Raises Unavailable, Refused.
    """
    found: dict[Place, OffsetAt | None] = {}
    left = dict(wanted)
    deadline = Deadline(cluster.settings.retry_deadline_ms)
    unknown = Deadline(cluster.settings.unknown_topic_ms_max)
    trouble: ClientError | None = None
    for _ in cluster.attempts(deadline):
        trouble = _ask_leaders(cluster, left, isolation, found)
        left = {place: when for place, when in left.items() if place not in found}
        if not left:
            return {place: found[place] for place in wanted}
        if isinstance(trouble, Refused) and (trouble.code not in UNKNOWN_TOPIC or unknown.is_over):
            raise trouble
        for topic, _ in left:
            cluster.forget_topic(topic)
    raise Unavailable(f"no offsets of {_names(left)} within {deadline.timeout_ms / 1000:g} s: {trouble}")


def _ask_leaders(
    cluster: Cluster, wanted: Mapping[Place, int], isolation: Isolation, found: dict[Place, OffsetAt | None]
) -> ClientError | None:
    """Put into `found` what the leaders tell; returns why one of them did not, with Refused only what may last."""
    led: dict[int, dict[Place, int]] = {}
    trouble: ClientError | None = None
    try:
        cluster.learn_topics({topic for topic, _ in wanted})
        for place, when in wanted.items():
            led.setdefault(cluster.leader(*place).leader_id, {})[place] = when
    except (Refused, Unavailable) as error:
        trouble = _passing(error)
    for node_id, asked in led.items():
        try:
            _ask_offsets(cluster, node_id, asked, isolation, found)
        except (Refused, Unavailable) as error:
            trouble = _passing(error)
    return trouble


def _passing(error: Refused | Unavailable) -> ClientError:
    is_passing = isinstance(error, Refused) and error.code in REMEDIES and error.code not in UNKNOWN_TOPIC
    return Unavailable(str(error)) if is_passing else error


def _ask_offsets(
    cluster: Cluster,
    node_id: int,
    wanted: Mapping[Place, int],
    isolation: Isolation,
    found: dict[Place, OffsetAt | None],
) -> None:
    """Raises Refused with the last of its refusals."""
    refused: Refused | None = None
    answer = cluster.connection(node_id).call(_offsets_request(cluster, wanted, isolation))
    for topic in answer.topics:
        for each in topic.partitions:
            place = (str(topic.name), int(each.partition_index))
            if each.error_code is ErrorCode.none:
                found[place] = _offset_at(each)
            else:
                refused = refusal(each.error_code, _names([place]))
    if refused is not None:
        raise refused


def _offsets_request(cluster: Cluster, wanted: Mapping[Place, int], isolation: Isolation) -> Any:
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


def _offset_at(told: Any) -> OffsetAt | None:
    if int(told.offset) == _NO_OFFSET:
        return None
    return OffsetAt(
        offset=int(told.offset),
        timestamp_ms=int(told.timestamp),
        leader_epoch=int(getattr(told, "leader_epoch", -1)),
    )


# Of a group


def committed(
    cluster: Cluster, group: str, partitions: Iterable[Place] | None = None, *, stable: bool = True
) -> dict[Place, CommittedOffset]:
    """What the group has committed, for these partitions or for all; those without a position are left out.

    `stable` waits for the end of transactions that commit offsets of it; who asks for all does not learn of partitions
    that have a position only in such a transaction. Raises Unavailable, Refused.
    """
    wanted = None if partitions is None else by_topic((place, None) for place in partitions)

    def ask(connection: Connection) -> dict[Place, CommittedOffset]:
        answer = connection.call(_committed_request(connection, group, wanted, stable), oldest=_OLDEST_FETCH)
        told = answer.groups[0] if hasattr(answer, "groups") else answer
        check(getattr(told, "error_code", ErrorCode.none), f"group {group}")
        return dict(_committed(group, told))

    return cluster.call_coordinator(Coordinates.GROUP, group, ask)


def _committed_request(
    connection: Connection, group: str, wanted: Mapping[str, list[tuple[int, None]]] | None, stable: bool
) -> Any:
    is_many = connection.version(_OFFSET_FETCH, _GROUPS_FROM) >= _GROUPS_FROM
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
    asked = schema_class(f"{module}:OffsetFetchRequestGroup")(group_id=group, topics=topics)
    return request(groups=(asked,), require_stable=stable)


def _committed(group: str, told: Any) -> Iterable[tuple[Place, CommittedOffset]]:
    for topic in told.topics:
        for each in topic.partitions:
            place = (str(topic.name), int(each.partition_index))
            check(each.error_code, f"group {group} in {place[0]}[{place[1]}]")
            if int(each.committed_offset) != _NO_OFFSET:
                yield (
                    place,
                    CommittedOffset(
                        offset=int(each.committed_offset),
                        leader_epoch=int(getattr(each, "committed_leader_epoch", -1)),
                        metadata=str(each.metadata or ""),
                    ),
                )


def commit(
    cluster: Cluster,
    group: str,
    offsets: Mapping[Place, int | CommittedOffset],
    *,
    metadata: str = "",
    generation: int = _NO_GENERATION,
    member: str = _NO_MEMBER,
) -> None:
    """As somebody outside the group, which may have no members then, or as a member. Raises Unavailable, Refused."""
    if not offsets:
        return
    request = _commit_request(group, offsets, metadata, generation, member)

    def ask(connection: Connection) -> None:
        for topic in connection.call(request, oldest=_OLDEST_COMMIT).topics:
            for each in topic.partitions:
                check(
                    each.error_code,
                    f"position of group {group} in {topic.name}[{each.partition_index}]",
                    "the group has members of its own"
                    if each.error_code is ErrorCode.unknown_member_id
                    else None,
                )

    cluster.call_coordinator(Coordinates.GROUP, group, ask)


def _commit_request(
    group: str, offsets: Mapping[Place, int | CommittedOffset], metadata: str, generation: int, member: str
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
    module: str, prefix: str, offsets: Mapping[Place, int | CommittedOffset], metadata: str
) -> tuple[Any, ...]:
    """Offsets as OffsetCommit and TxnOffsetCommit carry them."""
    partition = schema_class(f"{module}:{prefix}Partition")
    topic = schema_class(f"{module}:{prefix}Topic")
    values = ((place, _committing(value, metadata)) for place, value in offsets.items())
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


def _committing(value: int | CommittedOffset, metadata: str) -> CommittedOffset:
    return value if isinstance(value, CommittedOffset) else CommittedOffset(offset=value, metadata=metadata)


def group_info(cluster: Cluster, group: str) -> GroupInfo | None:
    """None where nobody knows the group. Raises Unavailable, Refused."""
    request = schema_class("list_groups.v5.request:ListGroupsRequest")(states_filter=(), types_filter=())

    def ask(connection: Connection) -> GroupInfo | None:
        answer = connection.call(request)
        check(answer.error_code, f"group {group}")
        for each in answer.groups:
            if each.group_id == group:
                return _group_info(each)
        return None

    return cluster.call_coordinator(Coordinates.GROUP, group, ask)


def list_groups(cluster: Cluster) -> list[GroupInfo]:
    """All groups of the cluster, by name. Raises Unavailable, Refused."""
    request = schema_class("list_groups.v5.request:ListGroupsRequest")(states_filter=(), types_filter=())

    def ask(connection: Connection) -> list[GroupInfo]:
        answer = connection.call(request)
        check(answer.error_code, "groups")
        return [_group_info(each) for each in answer.groups]

    found = {each.group: each for some in cluster.call_every_node(ask) for each in some}
    return [found[name] for name in sorted(found)]


def _group_info(told: Any) -> GroupInfo:
    return GroupInfo(
        group=str(told.group_id),
        state=str(getattr(told, "group_state", "")),
        kind=str(getattr(told, "group_type", "")).lower(),
        protocol=str(told.protocol_type),
    )


def _names(places: Iterable[Place]) -> str:
    return ", ".join(f"{topic}[{partition}]" for topic, partition in sorted(places))
