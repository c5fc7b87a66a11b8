"""A controller keeps its place among the voters: it joins once it has caught up, and says where it listens."""

from __future__ import annotations

import asyncio
import logging
import random
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.peers import CONTROL, PeerUnreachable
from penstock.cluster.names import CLUSTER_METADATA
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.raft.values import NOBODY, ReplicaKey, Voter

if TYPE_CHECKING:
    from penstock.broker.node import Node

logger = logging.getLogger("penstock.quorum")

_DESCRIBE, _ADD, _REMOVE, _UPDATE = 55, 80, 81, 82
_TIMEOUT_S: Final = 10.0
#: How often it is looked at without being told of a change, and the rest after a refusal.
_LOOK_S: Final = 1.0
_REST_S: Final = 0.3


async def keep_place(node: Node) -> None:
    quorum, reason = node.quorum, ""
    while True:
        quorum.changed.clear()
        try:
            await _step(node)
        except (ApiError, PeerUnreachable, TimeoutError) as error:
            if str(error) != reason:
                reason = str(error)
                logger.info("no voter yet", extra={"reason": reason})
            await asyncio.sleep(_REST_S * random.uniform(0.5, 1.5))
            continue
        except Exception:
            logger.exception("cannot keep a place among the voters")
        try:
            async with asyncio.timeout(_LOOK_S):
                await quorum.changed.wait()
        except TimeoutError:
            pass


async def _step(node: Node) -> None:
    """At most one change. Raises ApiError, PeerUnreachable, TimeoutError."""
    quorum = node.quorum
    if quorum.leader_id == NOBODY or not _has_caught_up(node):
        return
    known = quorum.voters.get(node.node_id)
    if known is not None and known.key == quorum.local:
        if known.addresses != quorum.addresses:
            await _update(node)
    elif node.settings.boolean("controller.quorum.auto.join.enable"):
        if known is not None:
            # This id with a disk that is gone: it can never vote again, and only one of an id may.
            await _refuse_to_replace_the_living(node, known.key)
            await _remove(node, known.key)
        await _add(node)


def _has_caught_up(node: Node) -> bool:
    quorum = node.quorum
    return 0 <= quorum.told_high_watermark <= quorum.state.log.synced.offset


async def _refuse_to_replace_the_living(node: Node, key: ReplicaKey) -> None:
    """Whoever votes under this id, and is heard of, is another process, and keeps its place.

    A leader hears of every voter that lives within this time, so it is asked only then.
    """
    epoch, timeout_ms = node.quorum.epoch, node.settings.integer("controller.quorum.fetch.timeout.ms")
    await asyncio.sleep(timeout_ms / 1000)
    silent_ms = await _silent_ms(node, key)
    if node.quorum.epoch != epoch:
        raise ApiError(ErrorCode.not_leader_or_follower, "another leader was elected meanwhile")
    if silent_ms is not None and silent_ms < timeout_ms:
        raise ApiError(ErrorCode.duplicate_voter, f"another process votes as node {key.id}")


async def _silent_ms(node: Node, key: ReplicaKey) -> int | None:
    """How long the leader has not heard of a voter, by its own clock; None: never, or it is no voter."""
    from kio.schema.describe_quorum.v2.request import DescribeQuorumRequest, PartitionData, TopicData

    asked = TopicData(topic_name=CLUSTER_METADATA, partitions=(PartitionData(partition_index=0),))
    leader_id = node.quorum.leader_id
    response = await node.peers.call(
        leader_id, _DESCRIBE, DescribeQuorumRequest(topics=(asked,)), timeout_s=_TIMEOUT_S, purpose=CONTROL
    )
    if response.error_code is not ErrorCode.none:
        raise ApiError(response.error_code, response.error_message)
    (topic,) = response.topics
    (partition,) = topic.partitions
    fetched_ms = {
        (voter.replica_id, voter.replica_directory_id): voter.last_fetch_timestamp
        for voter in partition.current_voters
    }
    now_ms = max(fetched_ms.values(), default=-1)  # the leader itself has fetched just now
    found_ms = fetched_ms.get((key.id, key.directory), -1)
    return None if found_ms < 0 else now_ms - found_ms


async def _add(node: Node) -> None:
    from kio.schema.add_raft_voter.v1.request import AddRaftVoterRequest, Listener

    local = node.quorum.local
    request = AddRaftVoterRequest(
        cluster_id=node.cluster_id,
        timeout=timedelta(seconds=_TIMEOUT_S),
        voter_id=local.id,
        voter_directory_id=local.directory,
        listeners=tuple(Listener(name=at.name, host=at.host, port=at.port) for at in node.quorum.addresses),
    )
    await _ask_leader(node, _ADD, request, accepted=(ErrorCode.duplicate_voter,))
    logger.info("joined the voters", extra={"node": local.id})


async def _remove(node: Node, key: ReplicaKey) -> None:
    from kio.schema.remove_raft_voter.v0.request import RemoveRaftVoterRequest

    request = RemoveRaftVoterRequest(
        cluster_id=node.cluster_id, voter_id=key.id, voter_directory_id=key.directory
    )
    await _ask_leader(node, _REMOVE, request, accepted=(ErrorCode.voter_not_found,))
    logger.warning("a voter on a lost disk was removed", extra={"node": key.id, "disk": str(key.directory)})


async def _update(node: Node) -> None:
    quorum = node.quorum
    if quorum.is_leader:
        await quorum.update_voter(Voter(quorum.local, quorum.addresses))
        return
    from kio.schema.update_raft_voter.v0.request import (
        KRaftVersionFeature,
        Listener,
        UpdateRaftVoterRequest,
    )

    request = UpdateRaftVoterRequest(
        cluster_id=node.cluster_id,
        current_leader_epoch=quorum.epoch,
        voter_id=quorum.local.id,
        voter_directory_id=quorum.local.directory,
        listeners=tuple(Listener(name=at.name, host=at.host, port=at.port) for at in quorum.addresses),
        k_raft_version_feature=KRaftVersionFeature(min_supported_version=0, max_supported_version=1),
    )
    await _ask_leader(node, _UPDATE, request)


async def _ask_leader(
    node: Node, api_key: int, request: Any, *, accepted: tuple[ErrorCode, ...] = ()
) -> None:
    response = await node.peers.call(
        node.quorum.leader_id, api_key, request, timeout_s=_TIMEOUT_S, purpose=CONTROL
    )
    code: ErrorCode = response.error_code
    if code is not ErrorCode.none and code not in accepted:
        raise ApiError(code, getattr(response, "error_message", None))
