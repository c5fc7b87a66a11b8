"""What the handlers of requests to coordinators share: durations in milliseconds, bounds of ids, topics by name or
id, grouping by topic, and descriptions of groups.

The heartbeats of consumer, share and streams groups have the same fields in different message classes, and so have
their descriptions. Each handler passes its own class, and the fields that only its type has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.network.requests import RequestContext
    from penstock.groups.group_shard import GroupCoordinatorShard
    from penstock.groups.topics import Topics


NO_THROTTLE: Final = timedelta(0)
#: Bit field: read, delete, describe, describe configs and alter configs, which are all operations on a group.
GROUP_AUTHORIZED_OPERATIONS: Final = 1 << 3 | 1 << 6 | 1 << 8 | 1 << 10 | 1 << 11
OPERATIONS_NOT_REQUESTED: Final = -(1 << 31)
_MILLISECOND: Final = timedelta(milliseconds=1)

_GATHERED_AT_ONCE: Final = 20

Item = TypeVar("Item")
Result = TypeVar("Result")


def milliseconds(time: timedelta) -> int:
    return time // _MILLISECOND


def client_host(ctx: RequestContext) -> str:
    """The client's address in the format that Kafka prints: a slash, and no host name."""
    return f"/{ctx.client_host}"


def check_id_lengths(ctx: RequestContext, *ids: str | None) -> None:
    """Check ids that clients choose and coordinators store. Raises ApiError INVALID_REQUEST if one is too long."""
    bytes_max = ctx.services.settings.integer("penstock.id.max.bytes")
    for id in ids:
        if id is not None and exceeds_utf8_bytes(id, bytes_max):
            raise ApiError(
                ErrorCode.invalid_request, f"An id is longer than penstock.id.max.bytes ({bytes_max}) allows."
            )


def check_protocol(ctx: RequestContext, feature: str, protocol: str) -> None:
    """Raises ApiError UNSUPPORTED_VERSION while the cluster is at level 0 of the feature."""
    if not ctx.services.image.features.get(feature):
        raise ApiError(ErrorCode.unsupported_version, f"The {protocol} protocol is not enabled.")


def heartbeat_response(response_class: Any, reply: Any, **details: Any) -> Any:
    """The response to a heartbeat of a consumer, share or streams group; `details` are fields that not all have."""
    return response_class(
        throttle_time=NO_THROTTLE,
        error_code=reply.error,
        error_message=reply.message,
        member_id=reply.member_id,
        member_epoch=reply.member_epoch,
        heartbeat_interval=timedelta(milliseconds=reply.heartbeat_interval_ms),
        **details,
    )


def exceeds_utf8_bytes(text: str, bytes_max: int) -> bool:
    """Whether a text has more bytes than that in UTF-8. Encodes it only if the number of characters does not decide."""
    return len(text) > bytes_max or (4 * len(text) > bytes_max and len(text.encode()) > bytes_max)


def resolve_topic_name(ctx: RequestContext, topic: Any) -> tuple[str | None, ErrorCode]:
    """Return the name of a topic in a request (newer versions send its id), or the error code."""
    topic_id: UUID | None = getattr(topic, "topic_id", None)
    if topic_id is not None:
        found = ctx.services.image.topics_by_id.get(topic_id)
        return (None, ErrorCode.unknown_topic_id) if found is None else (found.name, ErrorCode.none)
    name = getattr(topic, "name", None)
    if name is None:
        return None, ErrorCode.unknown_topic_id
    return name, ErrorCode.none


def group_by_topic(items: Iterable[tuple[str, Item]]) -> list[tuple[str, list[Item]]]:
    """Group the items by topic; the items of one topic must be adjacent."""
    return [(topic, [item for _, item in group]) for topic, group in groupby(items, key=itemgetter(0))]


#: Raises ApiError if the group does not exist or has another type.
DescribeGroup = Callable[["GroupCoordinatorShard", str], Any]


async def describe_groups(
    ctx: RequestContext,
    request: Any,
    group_class: Any,
    described: DescribeGroup,
    details_of: Callable[[Any], dict[str, Any]],
) -> tuple[Any, ...]:
    """Describe each group independently. `details_of` gets a group, or None after an error."""

    async def describe(group_id: str) -> Any:
        try:
            if not group_id:
                raise ApiError(ErrorCode.invalid_group_id)
            found = await ctx.services.groups.read(group_id, lambda shard: described(shard, group_id))
        except ApiError as error:
            return group_class(
                error_code=error.code,
                error_message=error.message,
                group_id=group_id,
                group_state="",
                group_epoch=0,
                assignment_epoch=0,
                **details_of(None),
            )
        details = details_of(found)
        if ctx.authorizer is not None and not _may_see_topics(ctx, details):
            return group_class(
                error_code=ErrorCode.topic_authorization_failed,
                error_message="The group has described topic(s) that the client is not authorized to describe.",
                group_id=group_id,
                group_state="",
                group_epoch=0,
                assignment_epoch=0,
                **details_of(None),
            )
        return group_class(
            error_code=ErrorCode.none,
            error_message=None,
            group_id=group_id,
            group_state=found.state,
            group_epoch=found.epoch,
            assignment_epoch=found.target_epoch,
            authorized_operations=group_operations(ctx, request, group_id),
            **details,
        )

    return tuple(await gather_in_pieces(describe, request.group_ids))


async def gather_in_pieces(
    call: Callable[[Item], Awaitable[Result]], items: Sequence[Item], *, at_once: int = _GATHERED_AT_ONCE
) -> list[Result]:
    """Await the call for each item, a few at the same time: each is a task, and all tasks run before other requests."""
    results: list[Result] = []
    for first in range(0, len(items), at_once):
        results += await asyncio.gather(*map(call, items[first : first + at_once]))
    return results


def group_operations(ctx: RequestContext, request: Any, group_id: str) -> int:
    """Return what the client may do with the group, as bits, if the request asks for it."""
    if not request.include_authorized_operations:
        return OPERATIONS_NOT_REQUESTED
    return ctx.authorized_operations(ResourceType.GROUP, group_id)


def _may_see_topics(ctx: RequestContext, details: dict[str, Any]) -> bool:
    """Whether the client may know all topics in the description of a consumer, share or streams group."""
    topology = details.get("topology")
    names = set() if topology is None else set(_topology_topics(topology))
    for member in details["members"]:
        for assignment in (member.assignment, getattr(member, "target_assignment", None)):
            names.update(topic.topic_name for topic in getattr(assignment, "topic_partitions", ()))
    return all(ctx.demand(Operation.DESCRIBE, ResourceType.TOPIC, name) for name in sorted(names))


def _topology_topics(topology: Any) -> Iterable[str]:
    for part in topology.subtopologies:
        yield from part.source_topics
        yield from part.repartition_sink_topics
        yield from (topic.name for topic in part.repartition_source_topics)
        yield from (topic.name for topic in part.state_changelog_topics)


async def describe_subscribed_groups(
    ctx: RequestContext,
    request: Any,
    group_class: Any,
    described: DescribeGroup,
    member_of: Callable[[Any, Topics], Any],
) -> tuple[Any, ...]:
    """Describe consumer or share groups, which have an assignor and members that subscribe to topics."""
    topics = ctx.services.groups.topics

    def details_of(found: Any) -> dict[str, Any]:
        if found is None:
            return {"assignor_name": "", "members": ()}
        return {
            "assignor_name": found.assignor,
            "members": tuple(member_of(member, topics) for member in found.members),
        }

    return await describe_groups(ctx, request, group_class, described, details_of)


def assigned_topics(
    assigned: Mapping[UUID, frozenset[int]], topics: Topics, topic_class: Any
) -> tuple[Any, ...]:
    """Leaves out deleted topics."""
    return tuple(
        topic_class(topic_id=topic.id, topic_name=topic.name, partitions=tuple(sorted(partitions)))
        for topic_id, partitions in assigned.items()
        if (topic := topics.by_id(topic_id)) is not None
    )
