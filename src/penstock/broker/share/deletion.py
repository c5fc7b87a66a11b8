"""Deleting the positions of a share group: some of them, or all before the group itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from penstock.broker.group_settings import effective_group_settings
from penstock.groups.share.positions import begin_delete
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.groups.share.messages import DeleteReply


class Deletion(NamedTuple):
    #: Of the topics that had positions.
    names: Mapping[UUID, str]
    #: What they still have, and why.
    errors: Mapping[UUID, ApiError]


def refuse_if_at_most_once(node: Node, group_id: str) -> None:
    """Raises ApiError for a group that must not be handed anything again."""
    if effective_group_settings(node, group_id).is_at_most_once:
        message = f"The positions of group {group_id} stay, because penstock.share.delivery is at-most-once."
        raise ApiError(ErrorCode.policy_violation, message)


async def delete_positions(node: Node, group_id: str, topics: Sequence[str] | None) -> Deletion:
    """None for the topics is all. Raises ApiError: GROUP_ID_NOT_FOUND for a group of another kind, too."""
    groups, upkeep = node.groups, node.share_upkeep
    async with upkeep.turn(group_id):
        reply: DeleteReply = await groups.write(
            group_id,
            lambda shard, token: begin_delete(shard, group_id, topics, token, now_ms=groups.now_ms()),
        )
        if reply.error is not ErrorCode.none:
            raise ApiError(reply.error, reply.message)
        errors = await upkeep.delete(group_id, reply.epoch, reply.places)
    return Deletion(reply.names, {topic_id: error for (topic_id, _), error in errors.items()})
