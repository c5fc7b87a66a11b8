"""DeleteShareGroupOffsets (key 92), v0. Deletes a share group's offsets for topics; the group must have no members.

If the group consumes such a topic again, share.auto.offset.reset decides where it starts. An at-most-once group keeps
its offsets (POLICY_VIOLATION), because it would get records again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kio.schema.delete_share_group_offsets.v0.response import (
    DeleteShareGroupOffsetsResponse,
    DeleteShareGroupOffsetsResponseTopic,
)

from penstock.broker.coordinators.requests import NO_THROTTLE
from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps, map_in_steps

if TYPE_CHECKING:
    from uuid import UUID

    from penstock.broker.coordinators.share.state_reconciler import ShareOffsetsDeletion

_UNKNOWN_TOPIC: Final = ApiError(ErrorCode.unknown_topic_or_partition)
_NO_STATE: Final = ApiError(ErrorCode.unknown_topic_or_partition, "There is no offset information to delete.")
_NO_ERROR: Final = ApiError(ErrorCode.none)


async def handle(ctx: RequestContext, request: Any) -> Any:
    names = list(dict.fromkeys(topic.topic_name for topic in request.topics))
    try:
        if not request.group_id:
            raise ApiError(ErrorCode.invalid_group_id)
        reconciler = ctx.services.share_state_reconciler
        reconciler.check_offsets_may_be_deleted(request.group_id)
        deletion = await reconciler.delete_offsets(request.group_id, names)
    except ApiError as error:
        return _response(error, ())
    return _response(None, await ctx.finish_in_slices(_topics(ctx, names, deletion)))


def _response(error: ApiError | None, topics: tuple[Any, ...]) -> Any:
    return DeleteShareGroupOffsetsResponse(
        throttle_time=NO_THROTTLE,
        error_code=ErrorCode.none if error is None else error.code,
        error_message=None if error is None else error.message,
        responses=topics,
    )


def _topics(ctx: RequestContext, names: list[str], deletion: ShareOffsetsDeletion) -> Steps[tuple[Any, ...]]:
    ids = {name: topic_id for topic_id, name in deletion.names.items()}
    return (yield from map_in_steps(lambda name: _topic(ctx, name, ids.get(name), deletion), names))


def _topic(ctx: RequestContext, name: str, topic_id: UUID | None, deletion: ShareOffsetsDeletion) -> Any:
    if topic_id is not None:
        error = deletion.errors.get(topic_id, _NO_ERROR)
    else:
        error = _UNKNOWN_TOPIC if ctx.services.groups.topics.get(name) is None else _NO_STATE
    return DeleteShareGroupOffsetsResponseTopic(
        topic_name=name, topic_id=topic_id, error_code=error.code, error_message=error.message
    )
