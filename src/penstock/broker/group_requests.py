"""What the group handlers share: times as numbers, topics by name or id, one answer for a failed shard."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.context import RequestContext

NO_THROTTLE: Final = timedelta(0)
#: Read, delete, describe, describe and alter settings: all that one can do with a group.
GROUP_OPERATIONS: Final = 1 << 3 | 1 << 6 | 1 << 8 | 1 << 10 | 1 << 11
OPERATIONS_NOT_ASKED: Final = -(1 << 31)
_MILLISECOND: Final = timedelta(milliseconds=1)

Item = TypeVar("Item")


def milliseconds(time: timedelta) -> int:
    return time // _MILLISECOND


def client_host(ctx: RequestContext) -> str:
    """As Kafka prints an address without a name."""
    return f"/{ctx.client_host}"


def check_ids(ctx: RequestContext, *ids: str | None) -> None:
    """Ids that clients choose and coordinators keep. Raises ApiError INVALID_REQUEST for one that is too long."""
    bytes_max = ctx.node.settings.integer("penstock.id.max.bytes")
    for id in ids:
        if id is not None and is_longer(id, bytes_max):
            raise ApiError(
                ErrorCode.invalid_request, f"An id is longer than penstock.id.max.bytes ({bytes_max}) allows."
            )


def is_longer(text: str, bytes_max: int) -> bool:
    """In UTF-8, which is encoded only where that may decide it."""
    return len(text) > bytes_max or (4 * len(text) > bytes_max and len(text.encode()) > bytes_max)


def named_topic(ctx: RequestContext, topic: Any) -> tuple[str | None, ErrorCode]:
    """The name of a topic in a request (by id in newer versions), or what is wrong with it."""
    topic_id: UUID | None = getattr(topic, "topic_id", None)
    if topic_id is not None:
        found = ctx.node.image.topics_by_id.get(topic_id)
        return (None, ErrorCode.unknown_topic_id) if found is None else (found.name, ErrorCode.none)
    name = getattr(topic, "name", None)
    if name is None:
        return None, ErrorCode.unknown_topic_id
    return name, ErrorCode.none


def by_topic(items: Iterable[tuple[str, Item]]) -> list[tuple[str, list[Item]]]:
    """Items of one topic, which follow each other, put together."""
    return [(topic, [item for _, item in group]) for topic, group in groupby(items, key=itemgetter(0))]
