"""How a node becomes a member of the quorum: it finds or founds its cluster, and a controller then joins the voters.

A node without data joins a running cluster, or the initial voters found one together. An initial voter waits until all
others have said that they belong to no cluster. Then the one with the lowest id founds a quorum of one voter, and the
others join it. So an initial voter that has lost its disk finds the others' cluster and never founds a second one.

A controller joins the voters once it has caught up, and keeps its address in the voter set up to date.
"""

from __future__ import annotations

import asyncio
import logging
import random
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from kio.schema.describe_cluster.v2.request import DescribeClusterRequest
from kio.schema.describe_quorum.v2.request import DescribeQuorumRequest, PartitionData, TopicData

from penstock.broker.network.peers import CONTROL, PeerUnreachable
from penstock.broker.quorum.driver import bootstrap_servers
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.raft.types import NO_LEADER, ReplicaKey, Voter

if TYPE_CHECKING:
    from penstock.broker.node import Node


logger = logging.getLogger("penstock.quorum")

_DESCRIBE_QUORUM: Final = 55
_DESCRIBE_CLUSTER: Final = 60
_ENDPOINT_TYPE_BROKERS: Final = 1
_PROBE_INTERVAL_S: Final = 0.1
_LOG_EVERY_ROUNDS: Final = 50


class ProbeResult(Enum):
    NO_CLUSTER = "belongs to no cluster"
    NOT_KNOWN = "does not answer"


async def find_cluster(node: Node) -> str | None:
    """The id of the cluster to join; None: this node shall found one. Waits for as long as it takes."""
    round_number = 0
    while True:
        answers = await asyncio.gather(*(_probe(node, at) for at in bootstrap_servers(node)))
        for answer in answers:
            if isinstance(answer, str):
                return answer
        if may_found(node) and all(answer is ProbeResult.NO_CLUSTER for answer in answers):
            return None
        if round_number % _LOG_EVERY_ROUNDS == 0:
            logger.info("looking for a cluster", extra={"servers": _probe_summary(node, answers)})
        round_number += 1
        await asyncio.sleep(_PROBE_INTERVAL_S * random.uniform(0.5, 1.5))


def may_found(node: Node) -> bool:
    """Only the lowest of the founders, and only where nobody is named that has a cluster already."""
    settings = node.settings
    return (
        settings.is_controller
        and not settings.bootstrap_servers
        and node.node_id == min(settings.initial_voters, default=None)
    )


async def _probe(node: Node, where: tuple[str, int]) -> str | ProbeResult:
    timeout_s = node.settings.integer("controller.quorum.request.timeout.ms") / 1000
    cluster_question = DescribeClusterRequest(
        include_cluster_authorized_operations=False,
        endpoint_type=_ENDPOINT_TYPE_BROKERS,
        include_fenced_brokers=False,
    )
    partition = PartitionData(partition_index=0)
    quorum_question = DescribeQuorumRequest(
        topics=(TopicData(topic_name=CLUSTER_METADATA, partitions=(partition,)),)
    )
    try:
        cluster = await node.peers.call(
            where, _DESCRIBE_CLUSTER, cluster_question, timeout_s=timeout_s, purpose=CONTROL
        )
        if cluster.cluster_id:
            return str(cluster.cluster_id)
        quorum = await node.peers.call(
            where, _DESCRIBE_QUORUM, quorum_question, timeout_s=timeout_s, purpose=CONTROL
        )
    except (PeerUnreachable, TimeoutError):
        return ProbeResult.NOT_KNOWN
    says_none = quorum.error_code is ErrorCode.unknown_topic_or_partition
    return ProbeResult.NO_CLUSTER if says_none else ProbeResult.NOT_KNOWN


def _probe_summary(node: Node, answers: list[str | ProbeResult]) -> str:
    pairs = zip(bootstrap_servers(node), answers, strict=True)
    return ", ".join(
        f"{host}:{port} {answer.value if isinstance(answer, ProbeResult) else answer}"
        for (host, port), answer in pairs
    )


_DESCRIBE, _ADD, _REMOVE, _UPDATE = 55, 80, 81, 82
_TIMEOUT_S: Final = 10.0
#: How often it is looked at without being told of a change, and the rest after a refusal.
_CHECK_INTERVAL_S: Final = 1.0
_RETRY_S: Final = 0.3


async def maintain_membership(node: Node) -> None:
    quorum, reason = node.quorum, ""
    while True:
        quorum.changed.clear()
        try:
            await _step(node)
        except (ApiError, PeerUnreachable, TimeoutError) as error:
            if str(error) != reason:
                reason = str(error)
                logger.info("no voter yet", extra={"reason": reason})
            await asyncio.sleep(_RETRY_S * random.uniform(0.5, 1.5))
            continue
        except Exception:
            logger.exception("cannot keep a place among the voters")
        try:
            async with asyncio.timeout(_CHECK_INTERVAL_S):
                await quorum.changed.wait()
        except TimeoutError:
            pass


async def _step(node: Node) -> None:
    """At most one change. Raises ApiError, PeerUnreachable, TimeoutError."""
    quorum = node.quorum
    if quorum.leader_id == NO_LEADER or not _has_caught_up(node):
        return
    known = quorum.voters.get(node.node_id)
    if known is not None and known.key == quorum.local:
        if known.addresses != quorum.addresses:
            await _update(node)
    elif node.settings.boolean("controller.quorum.auto.join.enable"):
        if known is not None:
            # This id with a disk that is gone: it can never vote again, and only one of an id may.
            await _check_voter_is_gone(node, known.key)
            await _remove(node, known.key)
        await _add(node)


def _has_caught_up(node: Node) -> bool:
    quorum = node.quorum
    return 0 <= quorum.leader_high_watermark <= quorum.state.log.synced.offset


async def _check_voter_is_gone(node: Node, key: ReplicaKey) -> None:
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
    await _request_leader(node, _ADD, request, accepted=(ErrorCode.duplicate_voter,))
    logger.info("joined the voters", extra={"node": local.id})


async def _remove(node: Node, key: ReplicaKey) -> None:
    from kio.schema.remove_raft_voter.v0.request import RemoveRaftVoterRequest

    request = RemoveRaftVoterRequest(
        cluster_id=node.cluster_id, voter_id=key.id, voter_directory_id=key.directory
    )
    await _request_leader(node, _REMOVE, request, accepted=(ErrorCode.voter_not_found,))
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
    await _request_leader(node, _UPDATE, request)


async def _request_leader(
    node: Node, api_key: int, request: Any, *, accepted: tuple[ErrorCode, ...] = ()
) -> None:
    response = await node.peers.call(
        node.quorum.leader_id, api_key, request, timeout_s=_TIMEOUT_S, purpose=CONTROL
    )
    code: ErrorCode = response.error_code
    if code is not ErrorCode.none and code not in accepted:
        raise ApiError(code, getattr(response, "error_message", None))
